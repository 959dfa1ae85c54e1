"""From stored tables, without a model: other defenses, smaller patches, maps, thresholds.

Everything here is computed for many images at once and equals what the algorithms in defenses/
say of one image at a time. `derive` reads each table once and asks everything of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pyarrow import compute

from patchcleanser.core.algorithms import challenger_masking, double_masking
from patchcleanser.core.cover import positions
from patchcleanser.core.geometry import Size
from patchcleanser.core.masks import MaskSet
from patchcleanser.core.results import Verdict
from patchcleanser.core.threats import Threat
from patchcleanser.errors import RecordError
from patchcleanser.records.metrics import Derived, Detection, Proportion
from patchcleanser.records.run import Run

Bools = NDArray[np.bool_]

CELLS = 64
"""Maps of images of different sizes are laid over each other on this many cells per side."""
SIDES = 12
"""At most so many smaller patches."""
KEPT_MASKS = 128
"""Mask sets kept at once; photographs come in thousands of sizes."""


@dataclass(frozen=True)
class Tables:
    """Stored tables of images of one size: `labels[n, u]` is the label of image n under union u."""

    masks: MaskSet
    index: NDArray[np.int64]
    truth: NDArray[np.int32]
    labels: NDArray[np.int32]

    @cached_property
    def good(self) -> Bools:
        """[images, masks]: masks whose whole row of two-mask labels is the true label."""
        wrong = self.labels != self.truth[:, None]
        return np.stack([~wrong[:, row].any(axis=1) for row in self.masks.unions.index], axis=1)


def tables(run: Run) -> Iterator[Tables]:
    """The stored tables, batch by batch and size by size, so that memory stays bounded."""
    if not run.job["table"]:
        raise RecordError(f"{run.folder} holds no two-mask tables; certify with --table")
    built = lru_cache(maxsize=KEPT_MASKS)(run.mask_set)
    for rows in _batches(run, ["index", "label", "height", "width", "table"]):
        sizes = list(zip(rows["height"].to_pylist(), rows["width"].to_pylist(), strict=True))
        for size in dict.fromkeys(sizes):
            mine, masks = rows.filter(pa.array([s == size for s in sizes])), built(size)
            _require_tables(run, mine, len(masks.unions))
            yield Tables(
                masks,
                mine["index"].to_numpy(),
                mine["label"].to_numpy(),
                lists(mine["table"]).astype(np.int32, copy=False),
            )


def _require_tables(run: Run, rows: pa.Table, unions: int) -> None:
    """Refuse tables that do not have one label for each union of masks."""
    lengths = compute.fill_null(compute.list_value_length(rows["table"]), 0).to_numpy()
    if (lengths != unions).any():
        at = int((lengths != unions).argmax())
        index = rows["index"][at].as_py()
        raise RecordError(
            f"row {index} of {run.folder} has {lengths[at]} two-mask labels, and its masks have {unions} unions; "
            f"delete {run.shard(index // run.batch).name} there and run the same command again to compute its rows anew"
        )


def _batches(run: Run, columns: Sequence[str]) -> Iterator[pa.Table]:
    """The answered rows of each batch that is done."""
    for batch in range(run.batches):
        if run.shard(batch).is_file():
            rows = run.read_batch(batch, ["skipped", *columns])
            yield rows.filter(compute.is_null(rows["skipped"]))


def lists(column: pa.ChunkedArray) -> NDArray[np.generic]:
    """A column of lists of one length as an array [rows, length]."""
    flat = column.combine_chunks()
    values: NDArray[np.generic] = flat.flatten().to_numpy(zero_copy_only=False).reshape(len(flat), -1)
    return values


def derive(run: Run) -> Derived | None:
    """All that a report shows beyond the rows themselves; None without stored tables."""
    sizes = _sizes(run) if run.job["table"] else []
    if not sizes:
        return None
    threats = _smaller_threats(run, sizes)
    reached = {side: Proportion(0, 0) for side in threats}
    answers = {name: Answers() for name in VERDICTS}
    weak = np.zeros((1, 1))
    for part in tables(run):
        for side, threat in threats.items():
            reached[side] += _row_certified(part, threat)
        for name in answers:
            answers[name] += _answers(part, VERDICTS[name])
        weak = weak + _missed(part, run.threat, common=len(sizes) > 1)
    images = answers["double-masking"].images
    exact = run.job["precision"] == "exact"
    return Derived(
        smaller=list(reached.items()),
        weakness=weak / max(images, 1),
        answers={name: found.told for name, found in answers.items()},
        detection=detection(run, np.linspace(0, 1, 21).tolist()) if exact else [],
    )


def row_certified(run: Run, threat: Threat) -> Proportion:
    """Images certified against a smaller threat by the masks of the larger one.

    The masks need only cover the smaller threat, so the row certificate of core.algorithms.certification_flow
    holds with fewer good masks; for the run's own threat it is the stored answer.
    """
    return sum((_row_certified(part, threat) for part in tables(run)), Proportion(0, 0))


def _row_certified(part: Tables, threat: Threat) -> Proportion:
    hides = _placements(part.masks, threat)
    if not hides.any(axis=1).all():
        part.masks.require_cover(threat)  # which names the patch
    pieces = np.array_split(part.good, max(1, len(part.index) * len(hides) // 50_000_000))
    hits = sum(int(_reached(good, hides).all(axis=1).sum()) for good in pieces)
    return Proportion(hits, len(part.index))


def _reached(good: Bools, hides: Bools) -> Bools:
    """[images, placements]: whether some good mask of the image hides the placement; eight masks at a time."""
    reached = np.zeros((len(good), len(hides)), dtype=bool)
    for mine, theirs in zip(np.packbits(good, axis=1).T, np.packbits(hides, axis=1).T, strict=True):
        reached |= (mine[:, None] & theirs) != 0
    return reached


def _placements(masks: MaskSet, threat: Threat) -> Bools:
    """[placements, masks]: which masks hide which patches; the hardest of K, or all of one.

    For one patch it is quicker to look at every distinct position than to find the hardest.
    """
    if threat.count > 1:
        return masks.cover(threat).hides
    room = threat.room(masks.image)
    each = [positions(masks.masks, shape, room)[2] for shape in threat.shapes(masks.image)]
    return np.concatenate([hides.reshape(-1, len(masks)) for hides in each])


def smaller(run: Run, largest: int = SIDES) -> list[tuple[int, Proportion]]:
    """The row certificate against ever smaller square patches, up to the run's own.

    Where images differ in size, and the patch with them, up to the smallest image's patch.
    """
    threats = _smaller_threats(run, _sizes(run), largest)
    return [(side, row_certified(run, threat)) for side, threat in threats.items()]


def _smaller_threats(run: Run, sizes: list[Size], largest: int = SIDES) -> dict[int, Threat]:
    if run.threat.count > 1 or any(len(run.threat.shapes(size)) > 1 for size in sizes):
        return {}
    own = {run.threat.shapes(size)[0] for size in sizes}
    most = min(min(shape) for shape in own)
    sides = np.unique(np.linspace(1, most, min(largest, most)).round().astype(int)).tolist()
    threats = {s: Threat.square(s, region=run.threat.region, grid=run.threat.grid) for s in sides}
    return threats | ({most: run.threat} if own == {(most, most)} else {})


def _sizes(run: Run) -> list[Size]:
    """The different sizes of the answered images."""
    found: dict[Size, None] = {}
    for rows in _batches(run, ["height", "width"]):
        found |= dict.fromkeys(zip(rows["height"].to_pylist(), rows["width"].to_pylist(), strict=True))
    return list(found)


def weakness(run: Run) -> NDArray[np.float64]:
    """[rows, columns]: share of the images whose proof does not reach a patch with its corner there.

    Corners count from the top left of the threat's region. Where images differ in size, relative
    places are laid over each other. Of several patch shapes the first is meant.
    """
    common = len(_sizes(run)) > 1
    sums, images = np.zeros((1, 1)), 0
    for part in tables(run):
        sums = sums + _missed(part, run.threat, common=common)
        images += len(part.index)
    return sums / max(images, 1)


def _missed(part: Tables, threat: Threat, *, common: bool) -> NDArray[np.float64]:
    """For each corner of a patch, the number of images whose good masks do not hide it."""
    room, shape = threat.room(part.masks.image), threat.shapes(part.masks.image)[0]
    if threat.count > 1:
        kinds, images = np.unique(part.good, axis=0, return_counts=True)
        maps = (part.masks.hidden_positions(threat, good)[shape] for good in kinds)
        missed = np.asarray(sum(n * (~hidden).astype(np.float64) for n, hidden in zip(images, maps, strict=True)))
    else:
        tops, lefts, hides = positions(part.masks.masks, shape, room)
        reached = _reached(part.good, hides.reshape(-1, len(part.masks)))
        cells = (~reached).sum(axis=0, dtype=np.float64)
        heights = np.diff([*tops, room.bottom - shape[0] + 1])
        widths = np.diff([*lefts, room.right - shape[1] + 1])
        missed = np.repeat(np.repeat(cells.reshape(len(tops), len(lefts)), heights, axis=0), widths, axis=1)
    if common:
        down, across = (np.arange(CELLS) * side // CELLS for side in missed.shape)
        missed = missed[down][:, across]
    return missed


Algorithm = Callable[[list[int], list[list[int]]], Verdict]

VERDICTS: dict[str, Algorithm] = {
    "double-masking": lambda one, two: double_masking(one, lambda i: two[i]),
    "challenger-masking": lambda one, two: challenger_masking(one, lambda i, j: two[i][j]),
}


@dataclass(frozen=True)
class Answers:
    """How many images a defense got right, and the classifications that took."""

    right: int = 0
    images: int = 0
    spent: int = 0

    def __add__(self, other: Answers) -> Answers:
        return Answers(self.right + other.right, self.images + other.images, self.spent + other.spent)

    @property
    def told(self) -> tuple[Proportion, float]:
        """Clean accuracy, and classifications an image."""
        return Proportion(self.right, self.images), self.spent / max(self.images, 1)


def verdicts(run: Run, defense: str) -> tuple[Proportion, float]:
    """Clean accuracy of another recovery defense on the same tables, and its classifications an image."""
    return sum((_answers(part, VERDICTS[defense]) for part in tables(run)), Answers()).told


def _answers(part: Tables, algorithm: Algorithm) -> Answers:
    size = len(part.masks)
    one = part.labels[:, :size]
    agreed = (one == one[:, :1]).all(axis=1)  # most images; every algorithm says the same of them
    found = Answers(int((one[agreed, 0] == part.truth[agreed]).sum()), int(agreed.sum()), size * int(agreed.sum()))
    for n in np.flatnonzero(~agreed):
        verdict = algorithm(one[n].tolist(), part.labels[n][part.masks.unions.index].tolist())
        found += Answers(int(verdict.label == part.truth[n]), 1, verdict.classifications)
    return found


def detection(run: Run, thresholds: Sequence[float]) -> list[Detection]:
    """Minority Reports at each threshold, from the stored one-mask labels and confidences.

    The alert fires if some mask contradicts the undefended label with confidence above the
    threshold; so the largest such confidence decides. An image is certified for detection if the
    smallest confidence in the true label, under any mask, is above it, and the undefended label is right.
    """
    if run.job["precision"] == "fast":
        raise RecordError("Minority Reports compares confidences, which fast labels lack; certify with exact ones")
    found = [Detection(t, Proportion(0, 0), Proportion(0, 0), Proportion(0, 0)) for t in thresholds]
    for rows in _batches(run, ["label", "undefended", "one_mask_labels", "one_mask_confidences"]):
        against, within, right = _confidence(rows)
        for k, at in enumerate(found):
            alert = against > at.threshold
            sure = (within > at.threshold) & right
            hits = (right & ~alert, sure, alert)
            clean, certified, alerts = (Proportion(int(h.sum()), len(h)) for h in hits)
            found[k] = replace(
                at,
                clean=at.clean + clean,
                detection_certified=at.detection_certified + certified,
                alerts=at.alerts + alerts,
            )
    return found


def _confidence(rows: pa.Table) -> tuple[NDArray[np.float64], NDArray[np.float64], Bools]:
    """Per image: the surest contradiction, the least sure right answer (or -inf), undefended right."""
    undefended, truth = rows["undefended"].to_numpy(), rows["label"].to_numpy()
    if not len(rows):
        return np.zeros(0), np.zeros(0), undefended == truth
    # Images may have different numbers of masks, so all masks of all images lie in one row.
    masks = compute.list_value_length(rows["one_mask_labels"]).to_numpy()
    labels, sure = (_flat(rows[name]) for name in ("one_mask_labels", "one_mask_confidences"))
    starts = np.concatenate([[0], np.cumsum(masks)[:-1]])
    never = np.float32(-np.inf)
    against = np.maximum.reduceat(np.where(labels != np.repeat(undefended, masks), sure, never), starts)
    within = np.minimum.reduceat(np.where(labels == np.repeat(truth, masks), sure, never), starts)
    # As wide as a threshold, as the live defense compares them.
    return against.astype(np.float64), within.astype(np.float64), undefended == truth


def _flat(column: pa.ChunkedArray) -> NDArray[np.generic]:
    values: NDArray[np.generic] = column.combine_chunks().flatten().to_numpy(zero_copy_only=False)
    return values
