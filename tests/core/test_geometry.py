from itertools import pairwise, product
from math import ceil

import numpy as np
import pytest

from patchcleanser.core.geometry import Window, axis_starts, axis_stride
from patchcleanser.errors import MaskError


@pytest.mark.parametrize("image", range(1, 65))
def test_starts_equal_the_formula_and_cover_every_patch(image: int) -> None:
    for patch in range(1, image + 1):
        for masks in range(1, image + 2):
            stride = ceil((image - patch + 1) / masks)
            length = min(patch + stride - 1, image)
            expected = sorted({s for s in range(0, image, stride) if s + length <= image} | {image - length})
            assert axis_stride(image, patch, masks) == stride
            starts, actual_length = axis_starts(image, patch, stride)
            assert (starts, actual_length) == (expected, length)
            assert len(starts) <= masks
            # A mask at s hides the patches that start at s … s + length - patch; no gap may be left.
            reach = length - patch + 1
            assert starts[0] == 0
            assert all(b - a <= reach for a, b in pairwise(starts))
            assert starts[-1] + reach == image - patch + 1


@pytest.mark.parametrize(
    ("image", "patch", "stride", "starts", "length"),
    [
        (224, 32, 33, [0, 33, 66, 99, 132, 160], 64),
        (6, 2, 1, [0, 1, 2, 3, 4], 2),
        (6, 2, 2, [0, 2, 3], 3),
        (32, 5, 5, [0, 5, 10, 15, 20, 23], 9),
        (5, 5, 1, [0], 5),
    ],
)
def test_anchor_cases(image: int, patch: int, stride: int, starts: list[int], length: int) -> None:
    assert axis_starts(image, patch, stride) == (starts, length)


@pytest.mark.parametrize("masks", [0, -1])
def test_fewer_than_one_mask_is_refused(masks: int) -> None:
    with pytest.raises(MaskError, match=f"at least 1 mask per axis is needed, got {masks}"):
        axis_stride(10, 3, masks)


def test_windows_overlap_and_contain_as_their_pixels_do() -> None:
    windows = [Window(*numbers) for numbers in product(range(3), range(2), range(1, 3), range(1, 3))]
    for first, second in product(windows, repeat=2):
        pixels = np.zeros((2, 5, 5), dtype=bool)
        pixels[0][first.slices] = pixels[1][second.slices] = True
        assert pixels[0].sum() == first.area
        assert first.overlaps(second) == pixels.all(0).any()
        assert first.contains(second) == (pixels[1] <= pixels[0]).all()
