"""Convert verdicts, certificates and masks to the schemas that are sent."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

import patchcleanser
from patchcleanser.core.algorithms import majority_label
from patchcleanser.core.geometry import Size, Window
from patchcleanser.core.label_table import UNMASKED, LabelTable
from patchcleanser.core.results import Case, Certificate, DetectionVerdict, Verdict
from patchcleanser.core.results import DetectionCertificate as DetectionProof
from patchcleanser.core.threats import Threat
from patchcleanser.engine.masking import ImageState
from patchcleanser.service import schemas
from patchcleanser.service.model import DefendedModel

Names = tuple[str, ...] | None


def name_of(label: int | None, names: Names) -> str | None:
    """The name of a class, if it has one."""
    return names[label] if names and label is not None and label < len(names) else None


def prediction(
    verdict: Verdict | DetectionVerdict, image: ImageState, names: Names, *, defense: str, details: bool
) -> schemas.Recovered | schemas.Detected:
    """The answer of `predict` for one image."""
    name = name_of(verdict.label, names)
    coarse = isinstance(verdict, Verdict) and verdict.case is Case.COARSE
    table = image.table.coarse if coarse and image.table.coarse else image.table  # of the round that answered
    undefended = int(image.table.labels[UNMASKED]), float(image.table.confidences[UNMASKED])
    common: dict[str, Any] = {
        "label": verdict.label,
        "name": name,
        "confidence": _spread(table),
        "masks": len(table.mask_set),
        "classifications": verdict.classifications,
        "details": _details(table, undefended, names) if details else None,
    }
    name = name or f"class {verdict.label}"
    if isinstance(verdict, DetectionVerdict):
        alert = "alert, a patch may be there; undefended label" if verdict.alert else "no alert;"
        return schemas.Detected(
            alert=verdict.alert, reporters=list(verdict.reporters), words=f"{alert} {name}", **common
        )
    return schemas.Recovered(
        case=verdict.case.value,
        disagreers=list(verdict.disagreers),
        suspected=_boxes(verdict.suspected) or None,
        words=f"{name}; {_explanation(verdict, len(table.mask_set), defense)}",
        **common,
    )


def certificate(
    proof: Certificate | DetectionProof, masks: int, names: Names, *, max_positions: int
) -> schemas.RecoveryCertificate | schemas.DetectionCertificate:
    """The answer of `certify` for one image; maps of more than `max_positions` positions are left out."""
    common: dict[str, Any] = {
        "label": proof.label,
        "name": name_of(proof.label, names),
        "margin": proof.margin if math.isfinite(proof.margin) else None,
        "masks": masks,
        "classifications": proof.classifications,
    }
    if isinstance(proof, DetectionProof):
        return schemas.DetectionCertificate(
            detection_certified=proof.detection_certified, failing_mask=proof.failing_mask, **common
        )
    maps, share = None, None
    if proof.positions is not None:
        positions = sum(proved.size for proved in proof.positions.values())
        share = sum(int(proved.sum()) for proved in proof.positions.values()) / positions
        maps = _maps(proof.positions) if positions <= max_positions else None
    return schemas.RecoveryCertificate(
        certified=proof.certified,
        row_certified=proof.row_certified,
        failing_pair=None if proof.failing_pair is None else list(proof.failing_pair),
        failing_placement=None if proof.failing_placement is None else _boxes(proof.failing_placement),
        unconfirmed=proof.unconfirmed,
        proved_share=share,
        maps=maps,
        **common,
    )


def mask_facts(table: LabelTable, threat: Threat) -> schemas.MasksAnswer:
    """The answer about the masks of a table."""
    masks, coarse = table.mask_set, table.coarse
    return schemas.MasksAnswer(
        height=masks.image[0],
        width=masks.image[1],
        threat=str(threat),
        patch_shapes=[list(shape) for shape in threat.shapes(masks.image)],
        masks=[_boxes(mask) for mask in masks.masks],
        predict_classifications=len(coarse.mask_set if coarse else masks),
        certify_classifications=table.size,
        covered=True,
    )


def model_facts(model: DefendedModel) -> schemas.ModelAnswer:
    """The answer about the model, the threat and the limits."""
    settings, classifier = model.settings, model.classifier
    limits = {name: value for name, value in vars(settings.limits).items() if name in schemas.LimitsAnswer.model_fields}
    pair = settings.masks if isinstance(settings.masks, tuple) else (settings.masks or 6,) * 2
    return schemas.ModelAnswer(
        version=patchcleanser.__version__,
        model=model.name,
        fingerprint=model.fingerprint,
        classes=classifier.classes,
        names=None if classifier.names is None else list(classifier.names),
        defense=settings.defense,
        may_alert=model.defense.may_alert,
        threat=str(settings.threat),
        grid=settings.threat.grid,
        masks=None if settings.stride is not None else list(pair),
        coarse=int(settings.options.get("coarse", 0)),
        may_choose_masks=model.may_choose_masks,
        device=classifier.device.type,
        precision="fast" if model.defense.fast else "exact",
        samples=len(model.samples),
        limits=schemas.LimitsAnswer(deadline_seconds=settings.limits.deadline, **limits),
    )


def _explanation(verdict: Verdict, masks: int, defense: str) -> str:
    count = len(verdict.disagreers)
    disagree = "disagree" if count > 1 else "disagrees"
    if defense == "challenger-masking" and count:
        winner = "one of the majority" if verdict.deciding_mask is None else f"mask {verdict.deciding_mask}"
        return f"{count} of {masks} masks {disagree}; they challenge each other, and the last one left is {winner}"
    return {
        "coarse": f"all {masks} masks of the coarse round agree",
        "agreed": f"all {masks} masks agree",
        "disagreer": "one mask changes the label, and with it no second mask does, as if it hid a patch",
        "majority": f"{count} of {masks} masks {disagree}, but not convincingly, so the majority decides",
    }[verdict.case.value]


def _spread(table: LabelTable) -> schemas.Spread:
    values = table.confidences[: len(table.mask_set)]
    return schemas.Spread(lowest=float(values.min()), median=float(np.median(values)), highest=float(values.max()))


def _details(table: LabelTable, undefended: tuple[int, float], names: Names) -> schemas.Details:
    masks, (label, confidence) = table.mask_set, undefended
    return schemas.Details(
        height=masks.image[0],
        width=masks.image[1],
        undefended=schemas.Named(label=label, name=name_of(label, names)),
        undefended_confidence=confidence,
        masks=[_boxes(mask) for mask in masks.masks],
        one_mask_labels=table.one_mask_labels(),
        one_mask_confidences=[float(value) for value in table.confidences[: len(masks)]],
        second_round=_second_round(table),
    )


def _boxes(windows: Iterable[Window]) -> list[schemas.Box]:
    return [schemas.Box(top=w.top, left=w.left, height=w.height, width=w.width) for w in windows]


def _second_round(table: LabelTable) -> list[schemas.Row]:
    """Rows of first masks of which some two-mask label was computed: those that disagreed with the majority."""
    if not (table.labels[len(table.mask_set) : -1] >= 0).any():
        return []
    one_mask = table.one_mask_labels()
    majority = majority_label(one_mask)
    return [
        schemas.Row(mask=mask, labels=[label if label >= 0 else None for label in table.row_labels(mask)])
        for mask, first in enumerate(one_mask)
        if first != majority
    ]


def _maps(positions: dict[Size, NDArray[np.bool_]]) -> list[schemas.PositionMap]:
    return [
        schemas.PositionMap(
            height=shape[0], width=shape[1], rows=["".join("01"[int(safe)] for safe in row) for row in proved]
        )
        for shape, proved in positions.items()
    ]
