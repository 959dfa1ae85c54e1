"""Defenses, one per file, each with predict and certify side by side. Classes are imported when first used."""

from __future__ import annotations

from typing import Any

from patchcleanser.core.entries import Entry, load_name

DEFENSES: dict[str, Entry] = {
    "double-masking": Entry(
        "patchcleanser.defenses.double_masking:DoubleMasking",
        "double-masking",
        "Every image is classified under each mask; where the labels disagree, the masks that disagree are tried again "
        "together with each other mask.",
        reference="double_masking",
        theorem="a_certified_image_keeps_its_label",
    ),
    "challenger-masking": Entry(
        "patchcleanser.defenses.challenger_masking:ChallengerMasking",
        "challenger masking",
        "Every image is classified under each mask; where the labels disagree, masks are compared two at a time until "
        "one label is left.",
        reference="challenger_masking",
        theorem="a_certified_image_keeps_its_label",
    ),
    "minority-reports": Entry(
        "patchcleanser.defenses.minority_reports:MinorityReports",
        "Minority Reports",
        "Every image is classified under each mask; if a confident label contradicts the undefended one, the answer is "
        "an alert instead of a label.",
        reference="minority_reports",
        theorem="never_silently_wrong",
    ),
    "one-pass": Entry(
        "patchcleanser.defenses.one_pass:OnePass",
        "one pass",
        "A network of small receptive fields looks at the image once; its answers under the masks are the means of the "
        "local logits that see no hidden pixel, or what its head says of features that see none. Where they disagree, "
        "masks are combined as in double-masking.",
        reference="double_masking",
        theorem="certain_labels_certify",
    ),
    "ds": Entry(
        "patchcleanser.defenses.smoothing:Smoothing",
        "de-randomized smoothing",
        "The classifier sees one band or block of the image at a time, and the views vote.",
        theorem="smoothing_keeps_the_label",
    ),
    "cbn": Entry(
        "patchcleanser.defenses.clipped_bagnet:ClippedBagNet",
        "Clipped BagNet",
        "Every local logit of a network of small receptive fields is squashed into [-1, 1], and they are summed.",
        theorem="summed_margin_is_a_lower_bound",
    ),
    "pg-bn": Entry(
        "patchcleanser.defenses.patchguard:PatchGuard",
        "PatchGuard on BagNet features",
        "For each class, the window of local logits that supports it most is removed.",
        theorem="patchguard_keeps_the_label",
    ),
    "pg-ds": Entry(
        "patchcleanser.defenses.patchguard:PatchGuardSmoothing",
        "PatchGuard on de-randomized smoothing",
        "For each class, the window of confidences that supports it most is removed.",
        theorem="patchguard_keeps_the_label",
    ),
    "bagcert": Entry(
        "patchcleanser.defenses.bagcert:BagCert",
        "BagCert",
        "Every place of a network of small receptive fields votes yes or no for each class.",
        theorem="summed_margin_is_a_lower_bound",
    ),
    "ibp": Entry(
        "patchcleanser.defenses.interval_bounds:IntervalBounds",
        "interval bound propagation",
        "The network answers as it is; the proof bounds its logits for every content of a patch at every place.",
    ),
    "patchguard++": Entry(
        "patchcleanser.defenses.patchguard_pp:PatchGuardPlusPlus",
        "PatchGuard++",
        "Every window of local logits is hidden once; if a confident label then contradicts the undefended one, the "
        "answer is an alert instead of a label.",
        theorem="never_silently_wrong",
    ),
}
"""Every defense by the name that users type. To add one: its file, and its entry here."""


_OTHERS = (
    "patchcleanser.defenses.defense:Defense",
    "patchcleanser.defenses.mask_defense:MaskDefense",
    "patchcleanser.defenses.multilabel_masking:MultiLabelMasking",
    "patchcleanser.defenses.object_seeker:ObjectSeeker",
)
"""Classes that users do not choose by name."""


def __getattr__(name: str) -> Any:
    return load_name(__name__, [*(entry.home for entry in DEFENSES.values()), *_OTHERS], name)
