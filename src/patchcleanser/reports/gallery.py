"""A few images of each kind, with what decided about them drawn on top."""

from __future__ import annotations

import base64
import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import pyarrow as pa
import pyarrow.compute as compute
from PIL import Image

from patchcleanser.core.geometry import Window
from patchcleanser.records.run import Row, Run
from patchcleanser.reports.studies import Study

LARGEST = 320
"""The longest side of a picture on the page, in px; about twice what is seen, for fine screens."""
HEAVY = 60_000
"""A PNG of more bytes than this goes onto the page as a JPEG."""
LONGEST = 44
"""Letters of an id below a picture."""
COARSE = 128
"""Pictures of at most this side are shown with hard pixels."""

TOLD = ["index", "id", "label", "skipped", "height", "width"]
TOLD += ["undefended", "answer", "alert", "certified", "row_certified", "detection_certified"]
"""What is told of every image, attacked or not."""

COLUMNS = [*TOLD, "one_mask_labels", "one_mask_confidences", "case", "deciding_mask", "weakest", "margin"]


@dataclass(frozen=True)
class Picture:
    """One picture with rectangles in the image's own pixels."""

    uri: str
    height: int
    width: int
    coarse: bool
    patches: list[Window]
    masks: list[Window]
    id: str
    truth: str
    undefended: str
    answer: str
    right: bool
    margin: float | None
    """Of certified images only: a margin says how firm a certificate is, and nothing without one."""
    outlined: list[Window]
    """Patches that the picture itself shows."""

    @property
    def short_id(self) -> str:
        """The end of the id, where files of a folder differ; from a folder's name on, if there is one."""
        if len(self.id) <= LONGEST:
            return self.id
        end = self.id[2 - LONGEST :]
        return f"…/{end.partition('/')[2] or end}" if "/" in end else f"…{end}"


def _nothing(study: Study, row: Row) -> tuple[list[Window], list[Window]]:
    return [], []


@dataclass(frozen=True)
class Kind:
    """One kind of image: which rows, what it shows, and what is drawn (patches, masks)."""

    title: str
    words: str
    wanted: Callable[[Row], bool]
    draw: Callable[[Study, Row], tuple[list[Window], list[Window]]] = _nothing


def _weakest(study: Study, row: Row) -> tuple[list[Window], list[Window]]:
    sides = row["weakest"] or []
    return [Window(*sides[i : i + 4]) for i in range(0, len(sides), 4)], []


def _deciding(study: Study, row: Row) -> tuple[list[Window], list[Window]]:
    masks = study.run.mask_set((row["height"], row["width"])).masks
    chosen = row["deciding_mask"]
    return [], list(masks[chosen]) if chosen is not None else []


def _reporters(study: Study, row: Row) -> tuple[list[Window], list[Window]]:
    """The mask whose label contradicts the undefended one most confidently."""
    if row["one_mask_labels"] is None:  # windows of features have no place to draw
        return [], []
    against = [
        (sure, mask)
        for mask, (label, sure) in enumerate(zip(row["one_mask_labels"], row["one_mask_confidences"], strict=True))
        if label != row["undefended"]
    ]
    masks = study.run.mask_set((row["height"], row["width"])).masks
    return [], list(masks[max(against)[1]]) if against else []


def _unproved(row: Row) -> bool:
    """Without masks there is no row certificate, and the certificate itself counts."""
    return (row["certified"] if row["row_certified"] is None else row["row_certified"]) is False


KINDS = (
    Kind(
        "Certified",
        "No patch of the threat changes the answer, wherever it lies.",
        lambda row: bool(row["certified"]),
    ),
    Kind(
        "Certified for detection",
        "No patch of the threat changes the label unnoticed; under attack there may be an alert instead.",
        lambda row: bool(row["detection_certified"]),
    ),
    Kind(
        "Right, but not proved",
        "Answered rightly, but the proof does not reach the patch drawn here (hatched): nobody showed that an "
        "attacker succeeds, and nobody can rule it out.",
        lambda row: row["answer"] == row["label"] and _unproved(row),
        _weakest,
    ),
    Kind(
        "Wrong",
        "The defended answer is wrong without any attack.",
        lambda row: row["answer"] != row["label"] and not row["alert"],
    ),
    Kind(
        "Case II: a disagreer decided",
        "Masks disagreed, and one of them (dashed) held its label under every second mask: where a patch would be "
        "suspected. These images are clean.",
        lambda row: row["case"] == "disagreer",
        _deciding,
    ),
    Kind(
        "Case III: the majority decided",
        "Masks disagreed and none held its label, so the majority's label was kept.",
        lambda row: row["case"] == "majority",
    ),
    Kind(
        "Alert on a clean image",
        "A mask (dashed) led to another label with confidence, so no answer was given: a false alarm.",
        lambda row: bool(row["alert"]),
        _reporters,
    ),
)


Shown = TypeVar("Shown")


def gallery(study: Study, each: int) -> list[tuple[Kind, list[Picture]]]:
    """Up to `each` pictures of each kind, of those kept beside the rows."""
    return shown(study, each, KINDS, COLUMNS, _picture)


def shown(
    study: Study,
    each: int,
    kinds: Sequence[Kind],
    columns: Sequence[str],
    make: Callable[[Study, Row, Kind], Shown | None],
) -> list[tuple[Kind, list[Shown]]]:
    """Up to `each` of each kind, made from rows whose picture was kept and can be read."""
    rows = _kept_rows(study.run, columns)
    found = []
    for kind in kinds:
        mine = [row for row in rows if kind.wanted(row)][:each]
        made = [it for row in mine if (it := make(study, row, kind)) is not None]
        if made:
            found.append((kind, made))
    return found


def _kept_rows(run: Run, columns: Sequence[str]) -> list[Row]:
    """The rows of images whose picture was kept, read from their batches only."""
    kept = sorted(int(path.stem) for path in (run.folder / "gallery").glob("*.png") if path.stem.isdecimal())
    rows: list[Row] = []
    for batch in sorted({index // run.batch for index in kept}):
        if batch < run.batches and run.shard(batch).is_file():
            table = run.read_batch(batch, columns)
            rows += table.filter(compute.is_in(table["index"], pa.array(kept))).to_pylist()
    return [row for row in rows if row["skipped"] is None]


def _picture(study: Study, row: Row, kind: Kind) -> Picture | None:
    found = encoded(study.run, row["index"])
    if found is None:
        return None
    patches, masks = kind.draw(study, row)
    margin = row["margin"] if row["certified"] or row["detection_certified"] else None
    return replace(clean_picture(study, row, found), patches=patches, masks=masks, margin=margin)


def clean_picture(study: Study, row: Row, uri: str) -> Picture:
    """An image without a patch, and what is answered; nothing drawn on it yet."""
    return Picture(
        uri=uri,
        height=row["height"],
        width=row["width"],
        coarse=max(row["height"], row["width"]) <= COARSE,
        patches=[],
        masks=[],
        id=row["id"],
        truth=study.class_name(row["label"]),
        undefended=study.answer_name(row["undefended"]),
        answer="an alert" if row["alert"] else study.answer_name(row["answer"]),
        right=row["answer"] == row["label"] or bool(row["alert"]),
        margin=None,
        outlined=[],
    )


def encoded(run: Run, index: int, end: str = "") -> str | None:
    """A kept picture as part of the page, shrunk and packed where it is large; None if it cannot be read."""
    try:
        content = (run.folder / "gallery" / f"{index}{end}.png").read_bytes()
        with Image.open(io.BytesIO(content), formats=["PNG"]) as picture:
            picture.load()
            if max(picture.size) <= LARGEST and len(content) <= HEAVY:
                return _uri("png", content)
            small = picture.convert("RGB")
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError):
        return None
    small.thumbnail((LARGEST, LARGEST))
    out = io.BytesIO()
    small.save(out, format="JPEG", quality=88)
    return _uri("jpeg", out.getvalue())


def _uri(kind: str, content: bytes) -> str:
    return f"data:image/{kind};base64,{base64.b64encode(content).decode()}"


def each_of(studies: Sequence[Study]) -> int:
    """How many pictures of a kind each run gets: fewer where many runs share a page."""
    return 8 if len(studies) == 1 else 4 if len(studies) <= 6 else 2
