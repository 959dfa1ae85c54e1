"""The plans that many experiments share: a dataset's usual patch, on the paper's grid or on the image's own."""

from __future__ import annotations

from dataclasses import replace

from patchcleanser.core.threats import Grid
from patchcleanser.paper.base import Plan
from patchcleanser.paper.models import LOW, MODELS

SIDE = 32
"""Of small images, which the paper enlarges to 224×224 to certify a patch seven times as long there."""

USUAL = {
    "imagenette": 32,
    "imagenet": 32,
    "flowers102": 32,
    "tiny-imagenet": 32,
    "cifar10": 5,
    "cifar100": 5,
    "svhn": 5,
}
"""Sides of the usual patch: 2% of 224×224, 2.4% of 32×32."""


def enlarges(model: str) -> bool:
    """Whether a classifier sees 32×32 images enlarged; our small networks take them as they are."""
    return MODELS[model].data in LOW and not _small(model)


def enlarged(model: str) -> int:
    """How many times as long as on the image a patch is on a classifier's input."""
    return MODELS[model].side // SIDE


def _small(model: str) -> bool:
    return MODELS[model].spec.startswith("zoo:") or "--model 'net:" in (MODELS[model].made or "")


def plan_of(model: str, side: int, *, masks: int = 6, data: str | None = None, grid: Grid | None = None) -> Plan:
    """A square patch: its side on 32×32 pixels for small images, on 224×224 for photographs.

    On the input grid, as in the paper, where images are resized or enlarged; our small networks resize
    nothing, so both grids are one. `grid="source"` asks for the patch on the pixels as they came.
    """
    data = data or MODELS[model].data
    if data in LOW and (grid == "source" or not enlarges(model)):
        patch, chosen = str(side), "source"
    else:
        patch, chosen = str(side * enlarged(model) if data in LOW else side), "input"
    usual = side == USUAL[data] and masks == 6
    return Plan(model, data, patch, grid=chosen, masks=masks, table=usual)  # type: ignore[arg-type]


def usual(model: str, *, masks: int = 6, data: str | None = None) -> Plan:
    """The dataset's usual patch."""
    return plan_of(model, USUAL[data or MODELS[model].data], masks=masks, data=data)


def timed(plan: Plan) -> Plan:
    """The same masks, timed one image at a time."""
    return replace(plan, table=False, work="time")
