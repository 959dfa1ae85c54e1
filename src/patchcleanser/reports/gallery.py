"""The pictures of a report: a few images of each kind, with patches and masks drawn on them; attacks before and after.

An attack can refute robustness; it proves nothing.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice, pairwise
from typing import TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as compute
from numpy.typing import NDArray
from PIL import Image

from patchcleanser.core.geometry import Window
from patchcleanser.records.derive import unproved_corners
from patchcleanser.records.run import Row, Run
from patchcleanser.reports import wording
from patchcleanser.reports.run_results import CASES, RunResult

MAX_SIDE = 320
"""The longest side of a picture on the page, in px; about twice its displayed size, for high-resolution screens."""
MAX_PNG_BYTES = 60_000
"""A larger PNG goes onto the page as a JPEG."""
PIXELATED_SIDE = 128
"""Pictures up to this side are enlarged without smoothing."""
SMALL_SIDE = 64
"""Images up to this side have a picture beside their row, also if no group shows them."""

_SHARED = ["index", "id", "label", "skipped", "height", "width"]
_SHARED += ["undefended", "answer", "alert", "certified", "row_certified", "detection_certified"]
COLUMNS = [*_SHARED, "one_mask_labels", "one_mask_confidences", "case", "deciding_mask", "weakest", "margin"]
ATTACK_COLUMNS = [*_SHARED, "fooled", "attacked_undefended", "attacked_answer", "attacked_alert", "attacked_case"]
ATTACK_COLUMNS += ["patches"]

CERTIFIED = {
    "certified": "certified",
    "row_certified": "row-certified",
    "detection_certified": "certified for detection",
}


@dataclass(frozen=True)
class Picture:
    """One picture with its labels, and rectangles in the image's own pixels."""

    uri: str
    height: int
    width: int
    pixelated: bool
    id: str
    truth: str
    undefended: str
    answer: str
    right: bool
    margin: float | None = None
    """Of certified images only: how firm the certificate is."""
    patches: list[Window] = field(default_factory=list)
    """Patches at one of the places where the proof fails; the picture does not show them."""
    unproved: list[Window] = field(default_factory=list)
    """Instead of these: every pixel that may be the centre of such a patch."""
    masks: list[Window] = field(default_factory=list)
    """The mask that decided, or that raised the alert; after an attack, one that hides the patch."""
    mask_use: str = ""
    """What that mask did."""
    outlined: list[Window] = field(default_factory=list)
    """Patches that the picture shows."""

    @property
    def short_id(self) -> str:
        """What a reader needs of the id."""
        return wording.short_id(self.id)


@dataclass(frozen=True)
class BeforeAfter:
    """One image before and after an attack, and what had been proved for it."""

    before: Picture
    after: Picture
    certified: str
    case: str | None


def _windows(sides: Sequence[int] | None) -> list[Window]:
    """Rectangles from a flat list of top, left, height and width."""
    sides = sides or []
    return [Window(*sides[i : i + 4]) for i in range(0, len(sides), 4)]


def _not_certified(row: Row) -> bool:
    """Defenses without masks have no row certificate; then the certificate itself counts."""
    return (row["certified"] if row["row_certified"] is None else row["row_certified"]) is False


def _certified(row: Row) -> bool:
    return bool(row["row_certified"] or row["detection_certified"])


def _right(row: Row) -> bool:
    """Whether the clean image is answered correctly."""
    return row["answer"] == row["label"] and not row["alert"]


Groups = dict[str, Callable[[Row], bool]]
"""By the name of a group (gallery.html.jinja has its title and explanation): which rows belong to it."""

GROUPS: Groups = {
    "not-proved": lambda row: row["answer"] == row["label"] and _not_certified(row),
    "wrong": lambda row: row["answer"] != row["label"] and not row["alert"],
    "disagreer": lambda row: row["case"] == "disagreer",
    "majority": lambda row: row["case"] == "majority",
    "alert": lambda row: bool(row["alert"]),
    "certified": lambda row: bool(row["certified"]),
    "detection-certified": lambda row: bool(row["detection_certified"]),
}
ATTACK_GROUPS: Groups = {
    "certified-fooled": lambda row: row["fooled"] and _certified(row),
    "recovered": lambda row: (
        row["undefended"] == row["label"] != row["attacked_undefended"]
        and row["attacked_answer"] == row["label"]
        and not row["attacked_alert"]
    ),
    "detected": lambda row: bool(row["attacked_alert"]),
    "fooled": lambda row: _right(row) and row["fooled"] and not _certified(row),
    "attack-failed": lambda row: row["undefended"] == row["label"] == row["attacked_undefended"] and not row["fooled"],
    "clean-wrong": lambda row: not _right(row) and not row["alert"],
}

GROUP_COLUMNS = [*_SHARED, "case"]
ATTACK_GROUP_COLUMNS = [name for name in ATTACK_COLUMNS if name != "patches"]
"""Everything that decides on a group."""

Shown = TypeVar("Shown")


def gallery(result: RunResult, each: int) -> dict[str, list[Picture]]:
    """Up to `each` pictures of each group, of those saved beside the rows."""
    return _groups(result, each, GROUPS, COLUMNS, _picture)


def attack_gallery(result: RunResult, each: int) -> dict[str, list[BeforeAfter]]:
    """Up to `each` images of each group, before and after the attack."""
    return _groups(result, each, ATTACK_GROUPS, ATTACK_COLUMNS, _before_after)


def group_sizes(result: RunResult) -> dict[str, int]:
    """How many images belong to each group, whether or not their pictures were saved."""
    groups, columns = (ATTACK_GROUPS, ATTACK_GROUP_COLUMNS) if result.attacked else (GROUPS, GROUP_COLUMNS)
    rows = [row for row in result.run.read(columns).to_pylist() if row["skipped"] is None]
    return {group: sum(map(matches, rows)) for group, matches in groups.items()}


def _groups(
    result: RunResult,
    each: int,
    groups: Groups,
    columns: Sequence[str],
    make: Callable[[RunResult, Row, str], Shown | None],
) -> dict[str, list[Shown]]:
    """The groups that are not empty, made from rows whose picture was saved and can be read; weak images first."""
    rows = saved_rows(result.run, columns) if each else []
    unproved = {} if result.derived is None else result.derived.unproved
    rows.sort(key=lambda row: (not GROUPS["not-proved"](row), unproved.get(row["index"], 0)))
    shown = {}
    for group, matches in groups.items():
        matching = [row for row in rows if matches(row)]
        if unproved and group == "not-proved" and len(matching) > each:  # from few places to many
            matching = [matching[at] for at in np.linspace(0, len(matching) - 1, each).round().astype(int)]
        pictures = [picture for row in matching[:each] if (picture := make(result, row, group)) is not None]
        if pictures:
            shown[group] = pictures
    return shown


def thumbnails(result: RunResult, shown: set[str], budget: int) -> dict[str, Picture]:
    """Pictures of small images beyond those shown, by id: weak images first, within this number of characters."""
    rows = saved_rows(result.run, COLUMNS) if budget and not result.attacked else []
    small: dict[str, Picture] = {}
    for row in sorted(rows, key=lambda row: not GROUPS["not-proved"](row)):
        if row["id"] in shown or max(row["height"], row["width"]) > SMALL_SIDE:
            continue
        picture = _picture(result, row, "")
        budget -= len(picture.uri) if picture else 0
        if budget < 0:
            break
        small |= {row["id"]: picture} if picture else {}
    return small


def saved_rows(run: Run, columns: Sequence[str]) -> list[Row]:
    """The answered rows of images whose picture was saved, read from their batches only."""
    indices = sorted(int(path.stem) for path in (run.folder / "gallery").glob("*.png") if path.stem.isdecimal())
    rows: list[Row] = []
    for batch in sorted({index // run.batch for index in indices}):
        if batch < run.batches and run.has(batch):
            table = run.read_batch(batch, columns)
            rows += table.filter(compute.is_in(table["index"], pa.array(indices))).to_pylist()
    return [row for row in rows if row["skipped"] is None]


def _picture(result: RunResult, row: Row, group: str, saved: tuple[Run, int] | None = None) -> Picture | None:
    """The picture, `saved` by this run or by another under another index."""
    run, index = saved or (result.run, row["index"])
    uri = saved_picture(run, f"{index}.png")
    if uri is None:
        return None
    picture = _clean_picture(result, row, uri)
    return replace(
        _with_failures(result, row, picture) if group == "not-proved" else picture,
        margin=row["margin"] if row["certified"] or row["detection_certified"] else None,
        masks=_deciding_mask(result, row, group),
        mask_use="raised the alert" if group == "alert" else "decided (Case II)",
    )


def _with_failures(result: RunResult, row: Row, picture: Picture) -> Picture:
    """With all places where the proof fails, from stored tables; without these with the one that the row names."""
    if result.derived is None or not _not_certified(row):
        return replace(picture, patches=_windows(row["weakest"]))
    size, threat = (row["height"], row["width"]), result.run.threat
    (height, width), room = threat.shapes(size)[0], threat.room(size)
    corners = unproved_corners(result.run, row["index"])
    return replace(picture, unproved=list(_blocks(corners, room.top + height // 2, room.left + width // 2)))


def _blocks(pixels: NDArray[np.bool_], top: int, left: int) -> Iterator[Window]:
    """Windows that together are these pixels, moved down and to the right."""
    edges = [0, *(np.flatnonzero((pixels[1:] != pixels[:-1]).any(axis=1)) + 1).tolist(), len(pixels)]
    for start, stop in pairwise(edges):
        turns = np.flatnonzero(np.diff(np.concatenate([[False], pixels[start], [False]]))).tolist()
        for first, last in zip(turns[::2], turns[1::2], strict=True):
            yield Window(top + start, left + first, stop - start, last - first)


def pictures_by_id(result: RunResult, other: RunResult, ids: set[str], each: int) -> list[Picture]:
    """Up to `each` pictures of these images, with the answers of `result`; either run may have saved the picture."""
    names = ["index", "id", "skipped"]
    runs = (other.run, result.run) if each else ()
    saved = {row["id"]: (run, row["index"]) for run in runs for row in saved_rows(run, names)}
    rows = result.run.read(COLUMNS)
    rows = rows.filter(compute.is_in(rows["id"], pa.array(sorted(ids & set(saved)), pa.string())))
    pictures = (_picture(result, row, "not-proved", saved[row["id"]]) for row in rows.to_pylist())
    return list(islice(filter(None, pictures), each))


def _deciding_mask(result: RunResult, row: Row, group: str) -> list[Window]:
    """The mask that decided an answer of case II, or that contradicts the undefended label most confidently."""
    mask = row["deciding_mask"]
    if group == "alert":
        labels, confidences = row["one_mask_labels"] or [], row["one_mask_confidences"] or []  # null without masks
        against = [(c, mask) for mask, c in enumerate(confidences) if labels[mask] != row["undefended"]]
        mask = max(against)[1] if against else None
    return [] if mask is None else list(result.run.mask_set((row["height"], row["width"])).masks[mask])


def _before_after(result: RunResult, row: Row, group: str) -> BeforeAfter | None:
    clean, attacked = (saved_picture(result.run, f"{row['index']}{end}.png") for end in ("", "-attacked"))
    if clean is None or attacked is None:
        return None
    before, patches = _clean_picture(result, row, clean), _windows(row["patches"])
    after = replace(
        before,
        uri=attacked,
        outlined=patches,
        masks=_hiding_mask(result, row, patches) if group == "recovered" else [],
        mask_use="hides the patch",
        undefended=result.answer_name(row["attacked_undefended"]),
        answer="an alert" if row["attacked_alert"] else result.answer_name(row["attacked_answer"]),
        right=row["attacked_answer"] == row["label"] or bool(row["attacked_alert"]),
    )
    certified = next((text for name, text in CERTIFIED.items() if row[name]), "not certified")
    return BeforeAfter(before, after, certified, CASES.get(row["attacked_case"]))


def _hiding_mask(result: RunResult, row: Row, patches: list[Window]) -> list[Window]:
    """Where a disagreer decided, the first mask that hides all patches: rows of attacks do not name the decider."""
    if row["attacked_case"] != "disagreer":
        return []
    masks = result.run.mask_set((row["height"], row["width"])).masks
    hiding = (m for m in masks if all(any(window.contains(patch) for window in m) for patch in patches))
    return list(next(hiding, ()))


def _clean_picture(result: RunResult, row: Row, uri: str) -> Picture:
    """The image without a patch, with nothing drawn on it."""
    return Picture(
        uri=uri,
        height=row["height"],
        width=row["width"],
        pixelated=max(row["height"], row["width"]) <= PIXELATED_SIDE,
        id=row["id"],
        truth=result.class_name(row["label"]),
        undefended=result.answer_name(row["undefended"]),
        answer="an alert" if row["alert"] else result.answer_name(row["answer"]),
        right=row["answer"] == row["label"] or bool(row["alert"]),
    )


def saved_picture(run: Run, name: str) -> str | None:
    """A saved picture as a data URI, shrunk if it is large; None if it cannot be read."""
    try:
        content, kind = (run.folder / "gallery" / name).read_bytes(), "png"
        with Image.open(io.BytesIO(content), formats=["PNG"]) as picture:
            picture.load()
            if max(picture.size) > MAX_SIDE or len(content) > MAX_PNG_BYTES:
                small, out, kind = picture.convert("RGB"), io.BytesIO(), "jpeg"
                small.thumbnail((MAX_SIDE, MAX_SIDE))
                small.save(out, format="JPEG", quality=88)
                content = out.getvalue()
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError):
        return None
    return f"data:image/{kind};base64,{base64.b64encode(content).decode()}"
