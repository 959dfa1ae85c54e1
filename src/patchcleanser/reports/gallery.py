"""The pictures of a report: a few images of each kind, with patches and masks drawn on them; attacks before and after.

An attack can refute robustness; it proves nothing.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import pyarrow as pa
import pyarrow.compute as compute
from PIL import Image

from patchcleanser.core.geometry import Window
from patchcleanser.records.run import Row, Run
from patchcleanser.reports.run_results import CASES, RunResult

MAX_SIDE = 320
"""The longest side of a picture on the page, in px; about twice its displayed size, for high-resolution screens."""
MAX_PNG_BYTES = 60_000
"""A larger PNG goes onto the page as a JPEG."""
MAX_ID_LENGTH = 44
"""Characters of an id below a picture."""
PIXELATED_SIDE = 128
"""Pictures up to this side are enlarged without smoothing."""

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
    """Patches that the proof does not cover; the picture does not show them."""
    masks: list[Window] = field(default_factory=list)
    outlined: list[Window] = field(default_factory=list)
    """Patches that the picture shows."""

    @property
    def short_id(self) -> str:
        """The end of the id, where files of a folder differ; from the start of a name, if it has several."""
        if len(self.id) <= MAX_ID_LENGTH:
            return self.id
        end = self.id[2 - MAX_ID_LENGTH :]
        return f"…/{end.partition('/')[2] or end}" if "/" in end else f"…{end}"


@dataclass(frozen=True)
class BeforeAfter:
    """One image before and after an attack, and what had been proved for it."""

    before: Picture
    after: Picture
    certified: str
    case: str | None


Rectangles = dict[str, Any]
"""Lists of windows to draw, by the name of a Picture's field."""


@dataclass(frozen=True)
class PictureGroup:
    """Pictures of one kind: title, explanation, which rows belong to it, and what is drawn on them."""

    title: str
    note: str
    matches: Callable[[Row], bool]
    draw: Callable[[RunResult, Row], Rectangles] = lambda result, row: {}


def _windows(sides: Sequence[int] | None) -> list[Window]:
    """Rectangles from a flat list of top, left, height and width."""
    sides = sides or []
    return [Window(*sides[i : i + 4]) for i in range(0, len(sides), 4)]


def _mask(result: RunResult, row: Row, mask: int | None) -> Rectangles:
    return {} if mask is None else {"masks": list(result.run.mask_set((row["height"], row["width"])).masks[mask])}


def _alerting_mask(result: RunResult, row: Row) -> Rectangles:
    """The mask whose label contradicts the undefended one with the highest confidence."""
    labels, confidences = row["one_mask_labels"] or [], row["one_mask_confidences"] or []  # null without masks
    against = [(c, mask) for mask, c in enumerate(confidences) if labels[mask] != row["undefended"]]
    return _mask(result, row, max(against)[1] if against else None)


def _not_certified(row: Row) -> bool:
    """Defenses without masks have no row certificate; then the certificate itself counts."""
    return (row["certified"] if row["row_certified"] is None else row["row_certified"]) is False


def _certified(row: Row) -> bool:
    return bool(row["row_certified"] or row["detection_certified"])


def _right(row: Row) -> bool:
    """Whether the clean image is answered correctly."""
    return row["answer"] == row["label"] and not row["alert"]


GROUPS = (
    PictureGroup(
        "Certified",
        "No patch of the threat can change the answer, wherever it is placed.",
        lambda row: bool(row["certified"]),
    ),
    PictureGroup(
        "Certified for detection",
        "No patch of the threat can change the label unnoticed; under attack there may be an alert instead.",
        lambda row: bool(row["detection_certified"]),
    ),
    PictureGroup(
        "Correct, but not proved",
        "Answered correctly, but the proof does not cover the patch drawn here (hatched): it is not shown that an "
        "attacker succeeds, and it cannot be ruled out.",
        lambda row: row["answer"] == row["label"] and _not_certified(row),
        lambda result, row: {"patches": _windows(row["weakest"])},
    ),
    PictureGroup(
        "Wrong",
        "The defended answer is wrong without any attack.",
        lambda row: row["answer"] != row["label"] and not row["alert"],
    ),
    PictureGroup(
        "Case II: a disagreer decided",
        "The masks disagreed, and one of them (dashed) kept its label under every second mask, as if it hid a patch. "
        "These images are clean.",
        lambda row: row["case"] == "disagreer",
        lambda result, row: _mask(result, row, row["deciding_mask"]),
    ),
    PictureGroup(
        "Case III: the majority decided",
        "The masks disagreed and none kept its label under every second mask, so the majority label is the answer.",
        lambda row: row["case"] == "majority",
    ),
    PictureGroup(
        "Alert on a clean image",
        "A mask (dashed) led to another label with high confidence, so no answer was given: a false alarm.",
        lambda row: bool(row["alert"]),
        _alerting_mask,
    ),
)

ATTACK_GROUPS = (
    PictureGroup(
        "Certified, and fooled",
        "This must not happen. Either the certificate or the run is broken; audit it before you trust any number here.",
        lambda row: row["fooled"] and _certified(row),
    ),
    PictureGroup(
        "Recovered",
        "The patch (outlined) makes the undefended classifier wrong; the defended one still answers correctly.",
        lambda row: (
            row["undefended"] == row["label"] != row["attacked_undefended"]
            and row["attacked_answer"] == row["label"]
            and not row["attacked_alert"]
        ),
    ),
    PictureGroup(
        "Detected",
        "Under attack there is an alert instead of an answer.",
        lambda row: bool(row["attacked_alert"]),
    ),
    PictureGroup(
        "The defense was fooled",
        "Answered correctly without the patch and wrongly with it. None of these images was certified.",
        lambda row: _right(row) and row["fooled"] and not _certified(row),
    ),
    PictureGroup(
        "The attack failed",
        "Even the undefended classifier keeps its correct answer under the worst patch that the attack found.",
        lambda row: row["undefended"] == row["label"] == row["attacked_undefended"] and not row["fooled"],
    ),
    PictureGroup(
        "Wrong without any attack",
        "The clean image is already answered wrongly, so it counts as fooled.",
        lambda row: not _right(row) and not row["alert"],
    ),
)

Shown = TypeVar("Shown")


def gallery(result: RunResult, each: int) -> list[tuple[PictureGroup, list[Picture]]]:
    """Up to `each` pictures of each group, of those saved beside the rows."""
    return _groups(result, each, GROUPS, COLUMNS, _picture)


def attack_gallery(result: RunResult, each: int) -> list[tuple[PictureGroup, list[BeforeAfter]]]:
    """Up to `each` images of each group, before and after the attack."""
    return _groups(result, each, ATTACK_GROUPS, ATTACK_COLUMNS, _before_after)


def _groups(
    result: RunResult,
    each: int,
    groups: Sequence[PictureGroup],
    columns: Sequence[str],
    make: Callable[[RunResult, Row, PictureGroup], Shown | None],
) -> list[tuple[PictureGroup, list[Shown]]]:
    """The groups that are not empty, made from rows whose picture was saved and can be read."""
    rows = _saved_rows(result.run, columns) if each else []
    shown = []
    for group in groups:
        matching = [row for row in rows if group.matches(row)][:each]
        pictures = [picture for row in matching if (picture := make(result, row, group)) is not None]
        if pictures:
            shown.append((group, pictures))
    return shown


def _saved_rows(run: Run, columns: Sequence[str]) -> list[Row]:
    """The answered rows of images whose picture was saved, read from their batches only."""
    indices = sorted(int(path.stem) for path in (run.folder / "gallery").glob("*.png") if path.stem.isdecimal())
    rows: list[Row] = []
    for batch in sorted({index // run.batch for index in indices}):
        if batch < run.batches and run.shard(batch).is_file():
            table = run.read_batch(batch, columns)
            rows += table.filter(compute.is_in(table["index"], pa.array(indices))).to_pylist()
    return [row for row in rows if row["skipped"] is None]


def _picture(result: RunResult, row: Row, group: PictureGroup) -> Picture | None:
    uri = _data_uri(result.run, f"{row['index']}.png")
    if uri is None:
        return None
    margin = row["margin"] if row["certified"] or row["detection_certified"] else None
    return replace(_clean_picture(result, row, uri), margin=margin, **group.draw(result, row))


def _before_after(result: RunResult, row: Row, group: PictureGroup) -> BeforeAfter | None:
    clean, attacked = (_data_uri(result.run, f"{row['index']}{end}.png") for end in ("", "-attacked"))
    if clean is None or attacked is None:
        return None
    before = _clean_picture(result, row, clean)
    after = replace(
        before,
        uri=attacked,
        outlined=_windows(row["patches"]),
        undefended=result.answer_name(row["attacked_undefended"]),
        answer="an alert" if row["attacked_alert"] else result.answer_name(row["attacked_answer"]),
        right=row["attacked_answer"] == row["label"] or bool(row["attacked_alert"]),
    )
    certified = next((text for name, text in CERTIFIED.items() if row[name]), "not certified")
    return BeforeAfter(before, after, certified, CASES.get(row["attacked_case"]))


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


def _data_uri(run: Run, name: str) -> str | None:
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
