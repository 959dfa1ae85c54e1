"""Which patches we defend against: shapes, how many, where, and on which pixel grid."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from typing import Any, Literal, TypeAlias

from patchcleanser.core.geometry import Size, Window, image_window, is_integer, is_number
from patchcleanser.errors import ThreatError

Grid = Literal["source", "input"]

AnyThreat: TypeAlias = "Threat | str | int"
"""A Threat, its text ("32", "12x83", "2%", "any:502"), or the side of a square in pixels."""

WRITTEN = re.compile(r"(?P<any>any:)?(?:(?P<percent>\d+(?:\.\d+)?) ?%|(?P<h>\d+)(?:x(?P<w>\d+))?(?: ?px)?)")
"""A patch as text."""


@dataclass(frozen=True)
class Rectangle:
    """One rectangle of fixed size (and so every smaller patch inside it)."""

    height: int
    width: int

    def shapes(self, image: Size, room: Size) -> list[Size]:
        return [(self.height, self.width)]

    def __str__(self) -> str:
        return f"{self.height}x{self.width}"


@dataclass(frozen=True)
class SquareShare:
    """The smallest square that holds a share of the image's pixels."""

    share: Fraction

    def shapes(self, image: Size, room: Size) -> list[Size]:
        """The square, for an image of this size."""
        side = math.isqrt(_pixels_of_share(self.share, image) - 1) + 1
        return [(side, side)]

    def __str__(self) -> str:
        return _percent(self.share)


@dataclass(frozen=True)
class AnyRectangle:
    """Every rectangle of at most `area` pixels, or of at most a share of the image."""

    area: int | None
    share: Fraction | None = None

    def pixels(self, image: Size) -> int:
        """The largest area allowed in an image of this size."""
        return self.area if self.area is not None else _pixels_of_share(self.share or Fraction(0), image)

    def shapes(self, image: Size, room: Size) -> list[Size]:
        """The maximal rectangles that fit the room: for each height the widest, without those inside another.

        A patch inside a covered patch is covered, so only these need checking (proofs/MaskSets.v:
        area_shapes_hold_every_rectangle, proofs/Certificate.v: every_rectangle_of_the_area_is_a_patch).

        >>> AnyRectangle(4).shapes((3, 4), (3, 4))
        [(1, 4), (2, 2), (3, 1)]
        """
        area = self.pixels(image)
        widest = [(h, min(room[1], area // h)) for h in range(1, min(room[0], area) + 1)]
        taller = [*(w for _, w in widest[1:]), 0]
        return [shape for shape, below in zip(widest, taller, strict=True) if shape[1] > below]

    def __str__(self) -> str:
        return f"any:{self.area}" if self.area is not None else f"any:{_percent(self.share or Fraction(0))}"


Shape = Rectangle | SquareShare | AnyRectangle


@dataclass(frozen=True)
class Threat:
    """The patches an attacker may print: `count` of them, each anywhere or inside `region`.

    `grid` names the pixels that are meant: those of the image as it came (``"source"``,
    sound for a printed or pasted patch) or those of the classifier's input after resizing
    and cropping (``"input"``, the paper's setting). Where nothing is resized both agree.

    >>> [Threat.share(p / 100).shapes((224, 224)) for p in (1, 2, 3)]
    [[(23, 23)], [(32, 32)], [(39, 39)]]
    >>> str(Threat.square(5, count=2))
    '2 patches of 5x5'
    """

    shape: Shape
    count: int = 1
    region: Window | None = None
    grid: Grid = "source"

    def __post_init__(self) -> None:
        if not isinstance(self.shape, Rectangle | SquareShare | AnyRectangle):
            raise ThreatError(f"make a threat by Threat.square(32), Threat.share(0.02) or the like, got {self.shape!r}")
        if not is_integer(self.count) or self.count < 1:
            raise ThreatError(f"a threat has at least 1 patch, got {self.count!r}")
        if self.grid not in ("source", "input"):
            raise ThreatError(f"grid is 'source' or 'input', got {self.grid!r}")
        if self.region is not None and not isinstance(self.region, Window):
            raise ThreatError(f"region is a Window(top, left, height, width), got {self.region!r}")

    @classmethod
    def of(cls, threat: Any) -> Threat:
        """A threat as it is, from its text ("2%" or "12x83"), or the square with a side of so many pixels."""
        if isinstance(threat, Threat):
            return threat
        if isinstance(threat, str):
            return cls.parse(threat)
        if is_integer(threat):
            return cls.square(threat)
        got = f"the {type(threat).__name__} {threat}" if is_number(threat) else type(threat).__name__
        raise ThreatError(
            f"a threat is a side in px, text as '32', '12x83' or '2%', or a Threat; got {got}{_probably(str(threat))}"
        )

    @classmethod
    def square(cls, side: int, *, count: int = 1, region: Window | None = None, grid: Grid = "source") -> Threat:
        """A square patch of `side` pixels."""
        return cls.rectangle(side, side, count=count, region=region, grid=grid)

    @classmethod
    def rectangle(
        cls, height: int, width: int, *, count: int = 1, region: Window | None = None, grid: Grid = "source"
    ) -> Threat:
        """A patch of height × width pixels; it is not turned on its side."""
        for side in (height, width):
            if not is_integer(side) or side < 1:
                raise ThreatError(f"a patch side is a whole number of at least 1 px, got {side!r}")
        return cls(Rectangle(int(height), int(width)), count, region, grid)

    @classmethod
    def share(cls, share: float, *, count: int = 1, region: Window | None = None, grid: Grid = "source") -> Threat:
        """The smallest square that holds this share of the image: 0.02 is 32 px at 224×224."""
        return cls(SquareShare(_fraction(share)), count, region, grid)

    @classmethod
    def any_rectangle(
        cls,
        area: int | None = None,
        *,
        share: float | None = None,
        count: int = 1,
        region: Window | None = None,
        grid: Grid = "source",
    ) -> Threat:
        """Every rectangle of at most `area` pixels, or of at most a `share` of the image."""
        if (area is None) == (share is None):
            raise ThreatError("any_rectangle takes an area in pixels or share=, one of the two")
        if area is not None and (not is_integer(area) or area < 1):
            raise ThreatError(f"an area is a whole number of at least 1 px, got {area!r}; for a share: share=")
        shape = AnyRectangle(None if area is None else int(area), None if share is None else _fraction(share))
        return cls(shape, count, region, grid)

    @classmethod
    def parse(cls, text: str, *, count: int = 1, region: Window | None = None, grid: Grid = "source") -> Threat:
        """A threat as written on the command line: 32, 12x83, 2%, any:502 or any:1%. Also "32px" and "2 %".

        >>> [str(Threat.parse(t)) for t in ("32", "12x83", "2.4%", "any:1%", "any:502")]
        ['32x32 patch', '12x83 patch', '2.4% patch', 'any:1% patch', 'any:502 patch']
        """
        match = WRITTEN.fullmatch(text.strip())
        if match is None or (match["any"] and match["w"]):
            raise ThreatError(f"cannot read patch {text!r}; write 32, 12x83, 2%, any:502 or any:1%{_probably(text)}")
        percent = None if match["percent"] is None else float(Fraction(match["percent"]) / 100)
        if percent is not None and not 0 < percent <= 1:
            raise ThreatError(f"a patch is more than 0% and at most 100% of the image, got {match['percent']}%")
        if match["any"]:
            area = None if match["h"] is None else int(match["h"])
            return cls.any_rectangle(area, share=percent, count=count, region=region, grid=grid)
        if percent is not None:
            return cls.share(percent, count=count, region=region, grid=grid)
        height = int(match["h"])
        return cls.rectangle(height, int(match["w"] or height), count=count, region=region, grid=grid)

    def to_dict(self) -> dict[str, Any]:
        """The threat as plain values; `from_dict` reads them back.

        >>> Threat.from_dict(Threat.share(0.02, count=2).to_dict()) == Threat.share(0.02, count=2)
        True
        """
        region = self.region and list(self.region.numbers)
        return {"shape": str(self.shape), "count": self.count, "region": region, "grid": self.grid}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Threat:
        """The threat that `to_dict` described."""
        region = values["region"] and Window(*values["region"])
        return cls.parse(values["shape"], count=values["count"], region=region, grid=values["grid"])

    def room(self, image: Size) -> Window:
        """The pixels a patch may take in an image of this size."""
        room = self.region or image_window(image)
        if not image_window(image).contains(room):
            raise ThreatError(f"region {room} lies outside an image of {image[0]}×{image[1]} px")
        return room

    def shapes(self, image: Size) -> list[Size]:
        """The maximal patch shapes in an image of this size; smaller patches fit inside one.

        A share is always a share of the whole image, also where a region is stated.
        """
        room = self.room(image)
        shapes = self.shape.shapes(image, (room.height, room.width))
        where = "an image" if self.region is None else "a region"
        for height, width in shapes:
            if height > room.height or width > room.width:
                side, limit = (height, room.height) if height > room.height else (width, room.width)
                raise ThreatError(f"patch of {side} px does not fit {where} side of {limit} px")
        return shapes

    def __str__(self) -> str:
        patches = f"{self.shape} patch" if self.count == 1 else f"{self.count} patches of {self.shape}"
        where = "" if self.region is None else f" inside {self.region}"
        return patches + where + (" on the input grid" if self.grid == "input" else "")


def _probably(text: str) -> str:
    """The end of a sentence about a patch that cannot be read: what was probably meant, if that is clear.

    >>> _probably("0.02"), _probably("12 × 83"), _probably("2 percent"), _probably("huge")
    ("; did you mean '2%'?", "; did you mean '12x83'?", "; did you mean '2%'?", '')
    """
    near = text.lower().strip().replace("percent", "%").replace("pixels", "px")
    near = re.sub(r" ?(%|px)$", lambda unit: unit[1], re.sub(r"\s*(?:[x×*,]|by)\s*(?=\d)", "x", near))
    if re.fullmatch(r"0?\.\d*[1-9]\d*", near):
        near = _percent(Fraction(near))
    elif re.fullmatch(r"[1-9]\d*\.0+", near):
        near = near.partition(".")[0]
    return f"; did you mean {near!r}?" if near != text and WRITTEN.fullmatch(near) else ""


def _pixels_of_share(share: Fraction, image: Size) -> int:
    """The fewest whole pixels that hold this share of an image."""
    return math.ceil(share * image[0] * image[1])


def _fraction(share: float) -> Fraction:
    """The decimal the user wrote, exactly: 0.02 is 1/50, not its binary neighbour."""
    if isinstance(share, bool) or not isinstance(share, (int, float)) or not 0 < share <= 1:
        raise ThreatError(f"a share of the image lies above 0 and at most at 1, got {share!r}; 2% is 0.02, 100% is 1")
    return Fraction(repr(float(share)))


def _percent(share: Fraction) -> str:
    return f"{(Decimal(repr(float(share))) * 100).normalize():f}%"  # exact, so that it can be read back
