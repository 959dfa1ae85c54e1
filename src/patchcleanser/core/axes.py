"""Masks along one axis that cover every patch: the arithmetic under every mask set."""

from __future__ import annotations

from patchcleanser.errors import MaskError


def axis_stride(image: int, patch: int, masks: int) -> int:
    """The smallest stride with which at most `masks` masks cover every patch.

    There are image - patch + 1 patch positions and each mask takes `stride` of them.

    >>> axis_stride(image=224, patch=32, masks=6)
    33
    """
    if masks < 1:
        raise MaskError(f"at least 1 mask per axis is needed, got {masks}")
    return -(-(image - patch + 1) // masks)


def axis_starts(image: int, patch: int, stride: int) -> tuple[list[int], int]:
    """Mask starts along one axis, and the mask length, that cover every patch.

    Masks of length patch + stride - 1 start every `stride` pixels, so the last mask
    starting at or before a patch starts at most stride - 1 pixels before it and ends
    at or after its end. The final mask is pulled back to end at the border.

    >>> axis_starts(image=10, patch=3, stride=3)
    ([0, 3, 5], 5)
    >>> axis_starts(image=224, patch=32, stride=33)
    ([0, 33, 66, 99, 132, 160], 64)
    """
    if stride < 1:
        raise MaskError(f"a stride is at least 1 px, got {stride}")
    length = min(patch + stride - 1, image)
    last = image - length
    return [*range(0, last, stride), last], length
