"""Certified against cost, as small SVG figures whose text and lines take the page's colours.

They are written here and not by matplotlib, so that the same claims give the same bytes everywhere.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

from patchcleanser.core.counts import counted
from patchcleanser.reports.claims import DefenseClaim

WIDTH, HEIGHT = 400, 270
LEFT, RIGHT, TOP, BOTTOM = 28, 16, 24, 40
"""Space around the axes, in px."""
FEWEST = 4
"""Points below which there is no figure."""
MARKS = {
    "re-derived": '<circle {at} r="5" fill="currentColor"/>',
    "measured": '<circle {at} r="4.5" fill="none" stroke="currentColor" stroke-width="2"/>',
    "reported": '<circle {at} r="5" fill="none" stroke="currentColor" stroke-width="2" stroke-dasharray="3.2 2"/>',
}
NAMED = 6
"""Most points with a number and a name."""
APART = 13
"""Least distance between two points with a number, in px."""
MARK, DIGIT = 6, (4, 5)
"""Half the size of a mark, and half the width and the height of a number, in px."""
DIRECTIONS = ((-1, 0), (-0.75, -0.75), (0, -1), (0.75, -0.75), (1, 0), (0.75, 0.75), (0, 1), (-0.75, 0.75))
"""From a point to its number: to the left first, then around it."""
Point = tuple[float, float]
Place = Callable[[float, float], Point]
"""Cost and percentage -> a point of the figure."""


@dataclass(frozen=True)
class Group:
    """Claims that may stand in one figure: same images, threat, pixel grid and unit of cost."""

    data: str
    threat: str
    patch: str
    grid: str | None
    unit: str

    @property
    def title(self) -> str:
        where = f"on the {self.grid} grid" if self.grid else "pixel grid not stated"
        return f"{self.data}, {self.threat}, {self.patch}, {where}"


Points = list[tuple[float, DefenseClaim]]
"""Cost of each claim."""


def groups(claims: Sequence[DefenseClaim]) -> dict[Group, Points]:
    """Recovery claims by figure: against classifications, and for reported ones against time on one machine."""
    points: dict[Group, Points] = {}
    for claim in (claim for claim in claims if claim.promise == "recovery"):
        cost, unit = claim.classifications, "classifications an image, answer and certificate"
        if cost is None and claim.milliseconds is not None:
            cost, unit = claim.milliseconds, f"milliseconds an image, {claim.hardware}"
        if cost is not None:
            group = Group(claim.data, claim.kind_of_threat, claim.size_of_patch, claim.grid, unit)
            points.setdefault(group, []).append((cost, claim))
    return {group: each for group, each in points.items() if len({cost for cost, _ in each}) >= FEWEST}


def best(points: Points) -> Points:
    """Those that no other claim beats: not more certified, at most as costly."""
    front: Points = []
    for cost, claim in sorted(points, key=lambda point: (point[0], -point[1].certified)):
        if not front or claim.certified > front[-1][1].certified:
            front.append((cost, claim))
    return front


def figure(group: Group, points: Points) -> str:
    """One figure as HTML on a single line of Markdown: cost to the right on a logarithmic axis, certified upwards.

    The most certified for their cost have numbers, and their names stand below.
    """
    steps = _steps(min(cost for cost, _ in points), max(cost for cost, _ in points))
    top = next(y for y in range(20, 101, 20) if y > max(claim.certified for _, claim in points) or y == 100)

    def place(cost: float, percent: float) -> tuple[float, float]:
        share = math.log(cost / steps[0]) / math.log(steps[-1] / steps[0])
        return LEFT + share * (WIDTH - LEFT - RIGHT), HEIGHT - BOTTOM - percent / top * (HEIGHT - TOP - BOTTOM)

    named = _spread([*reversed(best(points))], place)
    at = _numbers_at([place(cost, c.certified) for _, cost, c in named], [place(x, c.certified) for x, c in points])
    marks = [_mark(cost, claim, place) for cost, claim in sorted(points, key=lambda p: (p[0], p[1].file_name))]
    numbers = [_text(x, y, str(number), "middle") for number, (x, y) in enumerate(at, 1)]
    names = "".join(f"<li>{escape(_name(claim))}: {claim.certified:.1f}%</li>" for _, _, claim in named)
    label = escape(f"Certified accuracy against cost: {group.title}; {len(points)} claims")
    svg = "".join([*_axes(steps, top, place, group.unit), *marks, *numbers])
    svg = f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{label}">{svg}</svg>'
    return f"<figure>{svg}<figcaption>{escape(group.title)}<ol>{names}</ol></figcaption></figure>"


def _name(claim: DefenseClaim) -> str:
    masks = f"{claim.masks.replace('x', '×')} masks" if claim.masks else ""
    images = counted(claim.images, "image") if claim.images else ""
    return ", ".join(filter(None, (claim.method, masks, images)))


def _steps(least: float, most: float) -> list[float]:
    """Round numbers, 1, 2 or 5 times a power of ten, from below the least to above the most.

    >>> _steps(285, 980)
    [200, 500, 1000]
    """
    powers = range(math.floor(math.log10(least)) - 1, math.ceil(math.log10(most)) + 2)
    steps = [factor * 10**n if n >= 0 else factor / 10**-n for n in powers for factor in (1, 2, 5)]
    first = max(at for at, step in enumerate(steps) if step <= least)
    last = min(at for at, step in enumerate(steps) if step >= most)
    return steps[first : max(last, first + 1) + 1]


def _axes(steps: Sequence[float], top: int, place: Place, unit: str) -> list[str]:
    levels, shown = range(0, top + 1, 20), steps[:: -(-len(steps) // 7)]
    lines = [_line(place(steps[0], y), place(steps[-1], y)) for y in levels]
    left = [_text(LEFT - 6, place(steps[0], y)[1], str(y), "end") for y in levels]
    below = [_text(place(step, 0)[0], HEIGHT - BOTTOM + 14, f"{step:,g}", "middle") for step in shown]
    titles = [_text(0, 8, "certified, %", "start"), _text(WIDTH / 2, HEIGHT - 8, unit, "middle")]
    return [*lines, *left, *below, *titles]


def _mark(cost: float, claim: DefenseClaim, place: Place) -> str:
    x, y = place(cost, claim.certified)
    title = escape(f"{claim.method}: certified {claim.certified}%, cost {cost:,g}, {claim.standing}")
    mark = MARKS[claim.standing].format(at=f'cx="{x:.1f}" cy="{y:.1f}"')
    return f"<g><title>{title}</title>{mark}</g>"


def _numbers_at(points: Sequence[Point], marks: Sequence[Point]) -> list[Point]:
    """Where the numbers of points stand: beside each, clear of all marks, of the axis and of other numbers.

    If there is no such place within 30 px, a number stands to the left of its point, whatever is there.
    """
    numbers: list[Point] = []
    for x, y in points:
        around = [(x + far * right, y + far * down) for far in range(11, 31, 3) for right, down in DIRECTIONS]
        free = (at for at in around if at[0] > LEFT + DIGIT[0] and _is_clear(at, marks, numbers))
        numbers.append(next(free, around[0]))
    return numbers


def _is_clear(at: Point, marks: Sequence[Point], numbers: Sequence[Point]) -> bool:
    """Whether a number there overlaps no mark and no other number."""
    width, height = DIGIT
    sizes = [(mark, width + MARK, height + MARK) for mark in marks]
    sizes += [(number, 2 * width, 2 * height) for number in numbers]
    return all(abs(x - at[0]) >= wide or abs(y - at[1]) >= high for (x, y), wide, high in sizes)


def _spread(points: Points, place: Place) -> list[tuple[int, float, DefenseClaim]]:
    """The first few points that are far enough from each other, with their numbers."""
    spread: Points = []
    for cost, claim in points:
        at = place(cost, claim.certified)
        if all(math.dist(at, place(c, other.certified)) >= APART for c, other in spread) and len(spread) < NAMED:
            spread.append((cost, claim))
    return [(number, cost, claim) for number, (cost, claim) in enumerate(spread, 1)]


def _text(x: float, y: float, text: str, anchor: str) -> str:
    """Text, with its middle at this height."""
    return f'<text x="{x:.1f}" y="{y + 4:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _line(start: tuple[float, float], end: tuple[float, float]) -> str:
    return f'<path d="M{start[0]:.1f} {start[1]:.1f}L{end[0]:.1f} {end[1]:.1f}" stroke="currentColor" opacity=".18"/>'
