"""Verdicts, certificates and label tables to what is sent."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

import patchcleanser
from patchcleanser.core.algorithms import majority_label
from patchcleanser.core.geometry import Size, Window
from patchcleanser.core.label_table import UNMASKED, LabelTable
from patchcleanser.core.masks import MaskSet
from patchcleanser.core.results import Certificate, DetectionVerdict, Verdict
from patchcleanser.core.results import DetectionCertificate as DetectionProof
from patchcleanser.core.threats import Threat
from patchcleanser.engine.masking import ImageState
from patchcleanser.service import schemas
from patchcleanser.service.engine import Engine

Names = tuple[str, ...] | None


def box(window: Window) -> schemas.Box:
    """A window, as sent."""
    return schemas.Box(top=window.top, left=window.left, height=window.height, width=window.width)


def name_of(label: int, names: Names) -> str | None:
    """What a class is called, if anybody said."""
    return names[label] if names and label < len(names) else None


def prediction(
    verdict: Verdict | DetectionVerdict, subject: ImageState, names: Names, *, defense: str, details: bool
) -> schemas.Recovered | schemas.Detected:
    """The answer for one image."""
    table, masks = subject.table, subject.table.mask_set
    common: dict[str, Any] = {
        "label": verdict.label,
        "name": name_of(verdict.label, names),
        "confidence": _spread(table),
        "masks": len(masks),
        "classifications": verdict.classifications,
        "details": _details(subject, names) if details else None,
    }
    called = name_of(verdict.label, names) or f"class {verdict.label}"
    if isinstance(verdict, DetectionVerdict):
        word = "alert, a patch may be there; undefended label" if verdict.alert else "no alert;"
        return schemas.Detected(
            alert=verdict.alert, reporters=list(verdict.reporters), words=f"{word} {called}", **common
        )
    deciding = verdict.deciding_mask
    return schemas.Recovered(
        case=verdict.case.value,
        disagreers=list(verdict.disagreers),
        suspected=None if deciding is None else [box(window) for window in masks.masks[deciding]],
        words=f"{called}; {_how(verdict, len(masks), defense)}",
        **common,
    )


def certificate(
    found: Certificate | DetectionProof, masks: MaskSet, threat: Threat, names: Names, *, most: int
) -> schemas.RecoveryCertificate | schemas.DetectionCertificate:
    """The certificate of one image; maps of more than `most` positions are left out."""
    common: dict[str, Any] = {
        "label": found.label,
        "name": name_of(found.label, names),
        "margin": found.margin if math.isfinite(found.margin) else None,
        "masks": len(masks),
        "classifications": found.classifications,
    }
    if isinstance(found, DetectionProof):
        return schemas.DetectionCertificate(
            detection_certified=found.detection_certified, failing_mask=found.failing_mask, **common
        )
    hole, positions = found.failing_placement, found.positions
    return schemas.RecoveryCertificate(
        certified=found.certified,
        row_certified=found.row_certified,
        failing_pair=None if found.failing_pair is None else list(found.failing_pair),
        failing_placement=None if hole is None else [box(window) for window in hole],
        proved_share=None if positions is None else _share(positions),
        maps=None if positions is None else _maps(positions, most),
        **common,
    )


def mask_facts(masks: MaskSet, threat: Threat) -> schemas.MasksAnswer:
    """A mask set, as sent."""
    return schemas.MasksAnswer(
        height=masks.image[0],
        width=masks.image[1],
        threat=str(threat),
        patch_shapes=[list(shape) for shape in threat.shapes(masks.image)],
        masks=_boxes(masks),
        predict_classifications=len(masks),
        certify_classifications=len(masks.unions),
        covered=True,
    )


def model_facts(engine: Engine) -> schemas.ModelAnswer:
    """Which model answers, as sent."""
    settings, classifier, limits = engine.settings, engine.classifier, engine.settings.limits
    pair = settings.masks if isinstance(settings.masks, tuple) else (settings.masks or 6,) * 2
    return schemas.ModelAnswer(
        version=patchcleanser.__version__,
        model=engine.name,
        fingerprint=engine.fingerprint,
        classes=classifier.classes,
        names=None if classifier.names is None else list(classifier.names),
        defense=settings.defense,
        may_alert=engine.defense.may_alert,
        threat=str(settings.threat),
        grid=settings.threat.grid,
        masks=None if settings.stride is not None else list(pair),
        may_choose_masks=engine.may_choose_masks,
        device=classifier.device.type,
        precision="fast" if engine.defense.fast else "exact",
        samples=len(engine.samples),
        limits=schemas.LimitsAnswer(
            body_bytes=limits.body_bytes,
            file_bytes=limits.file_bytes,
            files=limits.files,
            pixels=limits.pixels,
            formats=list(limits.formats),
            masks=limits.masks,
            deadline_seconds=limits.deadline,
        ),
    )


def _how(verdict: Verdict, masks: int, defense: str) -> str:
    odd = len(verdict.disagreers)
    if defense == "challenger-masking" and odd:
        side = "of the majority" if verdict.deciding_mask is None else f"mask {verdict.deciding_mask}"
        return f"{odd} of {masks} masks disagree; played against each other, one is left: {side}"
    return {
        "agreed": f"all {masks} masks agree",
        "disagreer": "one mask changes the label, and with it no second mask does, as if it hid a patch",
        "majority": f"{odd} of {masks} masks disagree, none of them convincingly, so the majority decides",
    }[verdict.case.value]


def _spread(table: LabelTable) -> schemas.Spread:
    sure = table.confidences[: len(table.mask_set)]
    return schemas.Spread(lowest=float(sure.min()), median=float(np.median(sure)), highest=float(sure.max()))


def _details(subject: ImageState, names: Names) -> schemas.Details:
    table, masks = subject.table, subject.table.mask_set
    undefended = int(table.labels[UNMASKED])
    return schemas.Details(
        height=masks.image[0],
        width=masks.image[1],
        undefended=schemas.Named(label=undefended, name=name_of(undefended, names)),
        undefended_confidence=float(table.confidences[UNMASKED]),
        masks=_boxes(masks),
        one_mask_labels=table.one_mask_labels(),
        one_mask_confidences=[float(sure) for sure in table.confidences[: len(masks)]],
        second_round=_second_round(table),
    )


def _boxes(masks: MaskSet) -> list[list[schemas.Box]]:
    return [[box(window) for window in mask] for mask in masks.masks]


def _second_round(table: LabelTable) -> list[schemas.Row]:
    """Rows of first masks of which some two-mask label was computed: those that disagreed, or met others."""
    if table.spent <= len(table.mask_set) + 1:
        return []
    rows = ((mask, table.row_labels(mask)) for mask in range(len(table.mask_set)))
    one = table.one_mask_labels()
    majority = majority_label(one)
    return [
        schemas.Row(mask=mask, labels=[label if label >= 0 else None for label in row])
        for mask, row in rows
        if one[mask] != majority
    ]


def _share(positions: dict[Size, NDArray[np.bool_]]) -> float:
    return float(
        sum(int(found.sum()) for found in positions.values()) / sum(found.size for found in positions.values())
    )


def _maps(positions: dict[Size, NDArray[np.bool_]], most: int) -> list[schemas.PositionMap] | None:
    if sum(found.size for found in positions.values()) > most:
        return None
    return [
        schemas.PositionMap(height=shape[0], width=shape[1], rows=[_digits(row) for row in found])
        for shape, found in positions.items()
    ]


def _digits(row: Sequence[bool] | NDArray[np.bool_]) -> str:
    return "".join("1" if proved else "0" for proved in row)
