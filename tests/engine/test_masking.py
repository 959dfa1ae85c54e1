"""Hidden boxes are filled exactly, whichever kernels a device uses."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from patchcleanser import (
    Preprocessing,
    Threat,
    TorchClassifier,
)
from patchcleanser.core.label_table import UNMASKED, LabelTable
from patchcleanser.core.masks import MaskSet
from patchcleanser.engine.exact import ExactEngine
from patchcleanser.engine.fast.half import HalfPrecisionBackend
from patchcleanser.engine.masking import ImageState, PairBatch, apply_masks, box_masks, gather_images, visible_sums


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_windows_are_filled_and_nothing_else_is(dtype: torch.dtype) -> None:
    images = torch.randn(4, 3, 9, 11, generator=torch.Generator().manual_seed(0)).to(dtype)
    images[0, 0, 0] = torch.nan
    boxes = np.array(
        [[[0, 9, 0, 11], [0, 0, 0, 0]], [[0, 3, 2, 5], [1, 9, 4, 11]], [[8, 9, 10, 11]] * 2, [[0] * 4] * 2], np.int32
    )
    colour = (0.25, -1.5, 2.0)
    want = images.clone()
    for image, windows in enumerate(boxes.tolist()):
        for top, bottom, left, right in windows:
            for channel, value in enumerate(colour):
                want[image, channel, top:bottom, left:right] = value
    assert torch.equal(apply_masks(images.clone(), boxes, colour), want)
    assert not want.isnan().any()


@pytest.mark.parametrize("dtype", [None, torch.float16])
def test_each_pair_gets_a_copy_of_its_image(dtype: torch.dtype | None) -> None:
    draw = torch.Generator().manual_seed(0)
    images = [torch.randn(3, 5, 7, generator=draw) for _ in range(3)]
    which = np.array([0, 0, 2, 1, 2])
    copies = gather_images(images, which, dtype=dtype)
    assert copies.dtype == (dtype or torch.float32)
    assert torch.equal(copies, torch.stack([images[k].to(copies.dtype) for k in which]))


@pytest.mark.parametrize("grid", ["source", "input"])
@pytest.mark.parametrize("patches", [1, 2])
@pytest.mark.parametrize("fill", [None, (0.2, 0.7, 0.9), (0.3,)])
@pytest.mark.parametrize("aware", [False, True])
def test_masked_copies_are_the_image_outside_the_windows_and_the_fill_inside(
    aware: bool, fill: tuple[float, ...] | None, patches: int, grid: str, resnet: nn.Module
) -> None:
    colours = Preprocessing(mean=(0.4, 0.5, 0.6), std=(0.2, 0.3, 0.4), fill=fill)
    classifier = TorchClassifier(resnet, colours)
    classifier.mask_aware = aware
    engine, draw = ExactEngine(classifier, grid=grid), torch.Generator().manual_seed(0)
    masks = MaskSet.build(Threat.square(5, count=patches), image=(20, 24), masks=2)
    states = [
        ImageState(image if grid == "source" else colours(image[None])[0], LabelTable(masks))
        for image in torch.rand(3, 3, 20, 24, generator=draw)
    ]
    before = [s.pixels.clone() for s in states]
    unions = np.array([*range(len(masks.unions)), UNMASKED])
    which = np.arange(len(unions)) % 3  # in any order
    got = engine.masked_inputs(PairBatch(states, which, unions))
    for row, s, union in zip(got, which, unions, strict=True):
        hidden = torch.zeros(20, 24, dtype=torch.bool)
        for w in () if union == UNMASKED else masks.unions.masks[union]:
            hidden[w.top : w.bottom, w.left : w.right] = True
        colour = torch.tensor(colours.source_fill(3) if grid == "source" else colours.input_fill(3))[:, None, None]
        want = torch.where(hidden, colour, before[s])
        want = colours(want[None])[0] if grid == "source" else want
        assert torch.equal(row, torch.cat([want, hidden[None].float()]) if aware else want)
    assert all(torch.equal(s.pixels, old) for s, old in zip(states, before, strict=True))


@pytest.mark.parametrize("aware", [False, True])
def test_masked_copies_of_rounded_images_are_rounded_masked_copies(aware: bool, resnet: nn.Module) -> None:
    colours = Preprocessing(mean=(0.4, 0.5, 0.6), std=(0.2, 0.3, 0.4), fill=(0.2, 0.7, 0.9))
    classifier = TorchClassifier(resnet, colours)
    classifier.mask_aware = aware
    backend = HalfPrecisionBackend(classifier)
    assert backend.input_dtype == torch.float16
    masks = MaskSet.build(Threat.square(5), image=(20, 24), masks=2)
    unions = np.array([*range(len(masks.unions)), UNMASKED])
    for grid in ("source", "input"):
        engine, draw = ExactEngine(classifier, grid=grid), torch.Generator().manual_seed(0)
        states = [
            ImageState(image if grid == "source" else colours(image[None])[0], LabelTable(masks))
            for image in torch.rand(3, 3, 20, 24, generator=draw)
        ]
        pairs = PairBatch(states, np.sort(np.arange(len(unions)) % 3), unions)
        got, exact = engine.masked_inputs(pairs, backend.input_dtype), engine.masked_inputs(pairs)
        assert exact.dtype == torch.float32
        assert got.dtype == (torch.float16 if grid == "input" else torch.float32)  # resizing is done in float32
        assert torch.equal(got.half(), exact.half())


def test_sums_of_visible_pixels_ignore_what_is_hidden_and_nothing_else() -> None:
    draw = torch.Generator().manual_seed(0)
    masks = MaskSet.build(Threat.square(2, count=2), image=(9, 11), masks=2)
    clean = torch.rand(3, 9, 11, generator=draw)
    unions = np.arange(len(masks.unions.boxes))
    sums = visible_sums(PairBatch.of([ImageState(clean, LabelTable(masks))], [unions]))
    assert len(set(sums.tolist())) == len(unions)  # unions that hide different pixels
    hidden = box_masks(torch.from_numpy(masks.unions.boxes), (9, 11))
    for row in range(9):
        for column in range(11):
            attacked = clean.clone()
            attacked[:, row, column] = torch.rand(3, generator=draw)
            other = visible_sums(PairBatch.of([ImageState(attacked, LabelTable(masks))], [unions]))
            assert ((sums == other) == hidden[:, row, column].numpy()).all()
    signed = torch.where(clean < 0.5, 0.0, clean), torch.where(clean < 0.5, -0.0, clean)
    states = [ImageState(image, LabelTable(masks)) for image in signed]
    plus, minus = np.split(visible_sums(PairBatch.of(states, [unions, unions])), 2)
    assert (plus == minus).all()
