"""Hidden boxes are filled exactly, whichever way a device does it."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from patchcleanser.engine.masking import apply_masks, gather_images


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
