import re
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from patchcleanser import Threat, Window
from patchcleanser.core.threats import AnyRectangle
from patchcleanser.errors import InputError, ThreatError


@pytest.mark.parametrize(("share", "side"), [(0.01, 23), (0.02, 32), (0.03, 39), (1, 224), (1e-9, 1)])
def test_a_share_is_the_smallest_square_that_holds_it(share: float, side: int) -> None:
    assert Threat.share(share).shapes((224, 224)) == [(side, side)]
    assert (side - 1) ** 2 < Fraction(str(share)) * 224 * 224 <= side**2


def test_shares_are_exact_decimals() -> None:
    # 0.07 * 100 * 100 is 700.0000000000001 in binary floats, one pixel too many.
    assert Threat.any_rectangle(share=0.07).shape.pixels((100, 100)) == 700  # type: ignore[union-attr]


@pytest.mark.parametrize("area", [1, 2, 7, 12, 30, 63, 64, 100])
@pytest.mark.parametrize("room", [(8, 8), (5, 12), (1, 9)])
def test_maximal_rectangles_contain_every_rectangle_of_the_area(area: int, room: tuple[int, int]) -> None:
    shapes = AnyRectangle(area).shapes(room, room)
    for h in range(1, room[0] + 1):
        for w in range(1, room[1] + 1):
            allowed = h * w <= area
            inside = any(h <= a and w <= b for a, b in shapes)
            assert inside == allowed
    for a in shapes:  # none is superfluous
        assert not any(a != b and a[0] <= b[0] and a[1] <= b[1] for b in shapes)


def test_a_region_bounds_the_shapes_and_shares_stay_shares_of_the_image() -> None:
    region = Window(2, 2, 3, 20)
    assert Threat.any_rectangle(6, region=region).shapes((32, 32)) == [(1, 6), (2, 3), (3, 2)]
    assert Threat.share(0.0039, region=region).shapes((32, 32)) == [(2, 2)]


@pytest.mark.parametrize(
    ("text", "threat"),
    [
        ("32", Threat.square(32)),
        ("12x83", Threat.rectangle(12, 83)),
        ("2%", Threat.share(0.02)),
        ("2.4%", Threat.share(0.024)),
        ("any:1%", Threat.any_rectangle(share=0.01)),
        ("any:502", Threat.any_rectangle(502)),
        ("32px", Threat.square(32)),
        ("12x83 px", Threat.rectangle(12, 83)),
        ("2 %", Threat.share(0.02)),
    ],
)
def test_command_line_words(text: str, threat: Threat) -> None:
    assert Threat.parse(text) == threat
    assert Threat.from_dict(threat.to_dict()) == threat


@pytest.mark.parametrize("side", [5, np.int64(5), "5", Threat.square(5)])
def test_a_whole_number_is_the_side_of_a_square(side: Any) -> None:
    assert Threat.of(side) == Threat.square(5)


@pytest.mark.parametrize(
    ("near", "words"),
    [
        (0.02, "got the float 0.02; did you mean '2%'?"),
        (5.0, "got the float 5.0; did you mean '5'?"),
        ("0.02", "cannot read patch '0.02'; write 32, 12x83, 2%, any:502 or any:1%; did you mean '2%'?"),
        ("12 × 83", "did you mean '12x83'?"),
        ("32*32", "did you mean '32x32'?"),
        ("32 pixels", "did you mean '32px'?"),
    ],
)
def test_what_was_probably_meant_is_said(near: Any, words: str) -> None:
    with pytest.raises(ThreatError, match=re.escape(words)):
        Threat.of(near)


@pytest.mark.parametrize("far", ["huge", "5cm", "0.0", "any:3x4", 2.5, True, None])
def test_nothing_is_suggested_where_it_is_not_clear_what_was_meant(far: Any) -> None:
    with pytest.raises(ThreatError, match=r"^(?!.*did you mean).*$"):
        Threat.of(far)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Threat.square(0), "at least 1 px, got 0"),
        (lambda: Threat.square(2.5), "at least 1 px, got 2.5"),
        (lambda: Threat.square(True), "got True"),
        (lambda: Threat.share(2), "above 0 and at most at 1, got 2; 2% is 0.02"),
        (lambda: Threat.share(0), "got 0"),
        (lambda: Threat.share(float("nan")), "got nan"),
        (lambda: Threat.any_rectangle(), "one of the two"),
        (lambda: Threat.any_rectangle(5, share=0.1), "one of the two"),
        (lambda: Threat.any_rectangle(0.02), "for a share: share="),
        (lambda: Threat.square(3, count=0), "at least 1 patch, got 0"),
        (lambda: Threat.square(3, grid="pixels"), "grid is 'source' or 'input', got 'pixels'"),
        (lambda: Threat.square(3, region=(0, 0, 4, 4)), "region is a Window"),
        (lambda: Threat.parse("2 percent"), "cannot read patch '2 percent'; write 32, 12x83, 2%"),
        (lambda: Threat.parse("any:3x4"), "cannot read patch 'any:3x4'"),
        (lambda: Threat.square(50).shapes((32, 64)), "patch of 50 px does not fit an image side of 32 px"),
        (lambda: Threat.share(0.5).shapes((10, 400)), "patch of 45 px does not fit an image side of 10 px"),
        (lambda: Threat.square(2, region=Window(30, 0, 4, 4)).shapes((32, 32)), "outside an image of 32×32 px"),
        (lambda: Threat.square(5, region=Window(0, 0, 4, 9)).shapes((32, 32)), "does not fit a region side of 4 px"),
    ],
)
def test_bad_threats_say_what_is_wrong(make, words: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ThreatError, match=words.replace("(", r"\(")):
        make()


@pytest.mark.parametrize("bad", [(0, 0, 0, 3), (0, 0, 3, 0), (-1, 0, 2, 2), (0, -1, 2, 2)])
def test_windows_are_real_rectangles(bad: tuple[int, int, int, int]) -> None:
    with pytest.raises(InputError, match="a window"):
        Window(*bad)
