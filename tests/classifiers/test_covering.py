"""Hidden boxes are filled exactly and crops are cut exactly, whichever way a device does it."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from patchcleanser.classifiers.covering import _gathered, covered, cropped


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
    assert torch.equal(covered(images.clone(), boxes, colour), want)
    assert not want.isnan().any()


def test_crops_are_cut_where_they_are_said_to_be_either_way() -> None:
    images = list(torch.randn(3, 2, 9, 11, generator=torch.Generator().manual_seed(0)))
    which, corners = np.array([2, 0, 2, 2]), np.array([[0, 0], [4, 5], [5, 7], [1, 2]])
    want = torch.stack([images[k][:, t : t + 4, u : u + 3] for k, (t, u) in zip(which, corners, strict=True)])
    assert torch.equal(cropped(images, which, corners, (4, 3)), want)
    assert torch.equal(_gathered(images, which, corners, (4, 3)), want)
