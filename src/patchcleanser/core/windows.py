"""A rectangle of pixels."""

from __future__ import annotations

import operator
from dataclasses import dataclass

from patchcleanser.errors import InputError

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

    def contains(self, other: Window) -> bool:
        """Whether every pixel of `other` is a pixel of this window."""
        return (
            self.top <= other.top
            and self.left <= other.left
            and other.bottom <= self.bottom
            and other.right <= self.right
        )

    def __str__(self) -> str:
        return f"{self.height}×{self.width} at row {self.top}, column {self.left}"


def whole(image: Size) -> Window:
    """The window of all pixels of an image."""
    return Window(0, 0, *image)
