"""Rectangles of pixels, and masks along one axis that cover every patch."""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass
from numbers import Real

from patchcleanser.errors import InputError, MaskError

Size = tuple[int, int]
"""(height, width) in pixels."""


@dataclass(frozen=True, order=True)
class Window:
    """The pixels in rows top … bottom-1 and columns left … right-1.

    >>> w = Window(top=2, left=0, height=3, width=4)
    >>> w.bottom, w.right, w.area
    (5, 4, 12)
    >>> w.contains(Window(3, 1, 2, 2))
    True
    """

    top: int
    left: int
    height: int
    width: int

    def __post_init__(self) -> None:
        for name in ("top", "left", "height", "width"):
            if not is_integer(getattr(self, name)):
                raise InputError(f"the {name} of a window is a whole number of px, got {getattr(self, name)!r}")
            # numpy's small integers would wrap around when added.
            object.__setattr__(self, name, operator.index(getattr(self, name)))
        if self.height < 1 or self.width < 1:
            raise InputError(f"a window needs at least 1×1 px, got {self.height}×{self.width}")
        if self.top < 0 or self.left < 0:
            raise InputError(f"a window starts at row and column 0 or later, got ({self.top}, {self.left})")

    @property
    def numbers(self) -> tuple[int, int, int, int]:
        """Top, left, height and width."""
        return self.top, self.left, self.height, self.width

    @property
    def bottom(self) -> int:
        """One past the last row."""
        return self.top + self.height

    @property
    def right(self) -> int:
        """One past the last column."""
        return self.left + self.width

    @property
    def area(self) -> int:
        """Number of pixels."""
        return self.height * self.width

    @property
    def slices(self) -> tuple[slice, slice]:
        """Rows and columns, to index an image [..., H, W] by `image[(..., *window.slices)]`."""
        return slice(self.top, self.bottom), slice(self.left, self.right)

    def contains(self, other: Window) -> bool:
        """Whether every pixel of `other` is a pixel of this window."""
        return (
            self.top <= other.top
            and self.left <= other.left
            and other.bottom <= self.bottom
            and other.right <= self.right
        )

    def overlaps(self, other: Window) -> bool:
        """Whether the two windows share a pixel."""
        down = self.top < other.bottom and other.top < self.bottom
        return down and self.left < other.right and other.left < self.right

    def __str__(self) -> str:
        return f"{self.height}×{self.width} at row {self.top}, column {self.left}"


def image_window(image: Size) -> Window:
    """The window of all pixels of an image."""
    return Window(0, 0, *image)


def size_in_words(size: Size) -> str:
    """A size in pixels, so that nobody takes the height for the width.

    >>> size_in_words((32, 32)), size_in_words((1080, 1920))
    ('32×32', '1080 high × 1920 wide')
    """
    height, width = size
    return f"{height}×{width}" if height == width else f"{height} high × {width} wide"


def is_integer(value: object) -> bool:
    """Whether a value is a whole number, Python's or numpy's."""
    return hasattr(value, "__index__") and not isinstance(value, bool)


def is_number(value: object) -> bool:
    """Whether a value is a finite number, Python's or numpy's."""
    return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)


def axis_stride(image: int, patch: int, masks: int) -> int:
    """The smallest stride with which at most `masks` masks cover every patch.

    There are image - patch + 1 patch positions and each mask takes `stride` of them (proofs/MaskSets.v:
    axis_stride_is_the_smallest).

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
    at or after its end. The final mask is pulled back to end at the border (proofs/MaskSets.v: axis_starts_cover).

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
