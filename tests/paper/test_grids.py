"""Why a patch after enlarging is not the patch before: the numbers that docs/internals/pixel-grids.md prints."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

from patchcleanser import MaskSet, Threat

REPOSITORY = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def grids() -> ModuleType:
    spec = importlib.util.spec_from_file_location("grids", REPOSITORY / "benchmarks" / "grids.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_masks_for_35_enlarged_pixels_miss_559_of_784_source_patches(grids: ModuleType) -> None:
    masks = MaskSet.build(Threat.square(35, grid="input"), image=(224, 224), masks=6)
    missed = grids.missed(masks)
    assert len(missed) == 559
    assert "559 of the 784" in (REPOSITORY / "docs" / "internals" / "pixel-grids.md").read_text(encoding="utf-8")
    assert (14, 14) in missed  # the one in the picture


def test_an_enlarged_patch_touches_more_pixels_than_seven_times_its_side(grids: ModuleType) -> None:
    sides = {grids.footprint(at, at).height for at in range(28)}
    assert min(sides) == 45  # at the border of the image
    assert max(sides) == 55


def test_masks_for_55_enlarged_pixels_would_miss_none(grids: ModuleType) -> None:
    masks = MaskSet.build(Threat.square(55, grid="input"), image=(224, 224), masks=6)
    assert grids.missed(masks) == []
