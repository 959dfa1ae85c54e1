"""What follows from the stored labels of a run, without a model: other defenses, patches and thresholds.

Everything is computed for many images at once and equals what the algorithms of core/algorithms.py give for one
image at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
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
from patchcleanser.records.metrics import Bools, Proportion
from patchcleanser.records.run import Run

MAP_CELLS = 64
"""Maps of images of different sizes are averaged on a grid of this many cells per side."""
MAX_SIDES = 12
"""At most this many smaller patches."""
CACHED_MASK_SETS = 128
"""Mask sets in memory at once; photographs come in thousands of sizes."""
THRESHOLDS = tuple(np.linspace(0, 1, 21).tolist())

VERDICTS: dict[str, Callable[[list[int], list[list[int]]], Verdict]] = {
    "double-masking": lambda labels, table: double_masking(labels, lambda i: table[i]),
    "challenger-masking": lambda labels, table: challenger_masking(labels, lambda i, j: table[i][j]),
}
"""Per recovery defense: one-mask labels and the table of two-mask labels of an image -> its verdict."""


@dataclass(frozen=True)
class Detection:
    """Minority Reports at one threshold, on clean images."""

    threshold: float
    clean: Proportion
    detection_certified: Proportion
    alerts: Proportion


@dataclass(frozen=True)
class Derived:
    """What follows from stored two-mask tables."""

    smaller: list[tuple[int, Proportion]]
    """Side of a square patch in px, and the images row-certified against it by the run's masks."""
    weakness: NDArray[np.float64]
    """[rows, columns]: share of the images whose proof does not cover a patch with its top left corner there.

    Corners count from the top left of the threat's region. Where images differ in size, relative positions are
    averaged. Of several patch shapes the first is meant.
    """
    unproved: dict[int, float]
    """Per image, by its index: the share of places where a patch is not covered by the proof, of every shape."""
    answers: dict[str, tuple[Proportion, float]]
    """Per recovery defense: clean accuracy, and classifications per image; empty for labels from one pass."""
    detection: list[Detection]


@dataclass(frozen=True)
class TableBatch:
    """Stored tables of images of one size: `labels[n, u]` is the label of image n, number `index[n]`, under union u.

    `coarse_labels[n, i]` is its label under mask i of the coarse masks that were tried first, if there were any.
    """

    masks: MaskSet
    index: list[int]
    truth: NDArray[np.int32]
    labels: NDArray[np.int32]
    coarse: MaskSet | None
    coarse_labels: NDArray[np.int32] | None

    @cached_property
    def good(self) -> Bools:
        """[images, masks]: masks under which each other mask leaves the true label."""
        wrong = self.labels != self.truth[:, None]
        return np.stack([~wrong[:, row].any(axis=1) for row in self.masks.unions.index], axis=1)

    @property
    def good_masks(self) -> list[tuple[MaskSet, Bools]]:
        """The mask sets whose good masks must cover the threat: the fine one, and the coarse one if there is one."""
        if self.coarse is None or self.coarse_labels is None:
            return [(self.masks, self.good)]
        return [(self.masks, self.good), (self.coarse, self.coarse_labels == self.truth[:, None])]


def derive(run: Run) -> Derived | None:
    """Derive all that a report shows beyond the rows themselves; None without stored tables."""
    sizes = _sizes(run) if run.job["table"] else []
    if not sizes:
        return None
    threats = _smaller_threats(run, sizes)
    certified = {side: Proportion(0, 0) for side in threats}
    rounds = () if _in_one_pass(run) else (False, True) if run.coarse else (False,)
    counts = {(name, coarse): np.zeros(3, dtype=np.int64) for coarse in rounds for name in VERDICTS}
    uncovered, unproved, images = np.zeros((1, 1)), dict[int, float](), 0
    for part in _tables(run):
        images += len(part.truth)
        for side, threat in threats.items():
            certified[side] += _row_certified(part, threat)
        for name, coarse in counts:
            counts[name, coarse] += _count_answers(part, name, coarse=coarse)
        uncovered = uncovered + _count_uncovered(part, run.threat, common=len(sizes) > 1)
        unproved |= zip(part.index, _share_uncovered(part, run.threat), strict=True)
    return Derived(
        smaller=list(certified.items()),
        weakness=uncovered / max(images, 1),
        unproved=unproved,
        answers={
            f"{name} after a coarse round" if coarse else name: _accuracy(count)
            for (name, coarse), count in counts.items()
        },
        detection=detection(run, THRESHOLDS) if run.job["precision"] == "exact" and not _in_one_pass(run) else [],
    )


def _in_one_pass(run: Run) -> bool:
    """Whether all labels of an image come from one pass: under masks of their own, and not with the same bits again."""
    return bool(run.job.get("receptive_field"))


def _require_masked_images(run: Run) -> None:
    """Refuse labels that other defenses would not see: they classify each masked image by itself."""
    if _in_one_pass(run):
        raise RecordError(
            f"the labels in {run.folder} come from one pass each, so nothing follows about other defenses; certify "
            "with the other defense"
        )


def _tables(run: Run, index: int | None = None) -> Iterator[TableBatch]:
    """The stored tables, or that of one image, batch by batch and size by size, so that memory stays bounded."""
    if not run.job["table"]:
        raise RecordError(f"{run.folder} holds no two-mask tables; certify with --table")
    mask_set = lru_cache(maxsize=CACHED_MASK_SETS)(run.mask_set)
    coarse_mask_set = lru_cache(maxsize=CACHED_MASK_SETS)(run.coarse_mask_set)
    for batch in _batches(run, ["index", "label", "height", "width", "table", "coarse_labels"], index):
        sizes = list(zip(batch["height"].to_pylist(), batch["width"].to_pylist(), strict=True))
        for size in dict.fromkeys(sizes):
            rows, masks = batch.filter(pa.array([s == size for s in sizes])), mask_set(size)
            _require_tables(run, rows, len(masks.unions))
            tables, coarse_labels = (
                _flat(rows[name]).reshape(len(rows), -1).astype(np.int32, copy=False)
                for name in ("table", "coarse_labels")
            )
            coarse = coarse_mask_set(size)
            facts = rows["index"].to_pylist(), rows["label"].to_numpy(), tables
            yield TableBatch(masks, *facts, coarse, coarse_labels if coarse else None)


def _require_tables(run: Run, rows: pa.Table, unions: int) -> None:
    """Refuse tables that do not have one label for each union of masks."""
    lengths = compute.fill_null(compute.list_value_length(rows["table"]), 0).to_numpy()
    if (lengths != unions).any():
        at = int((lengths != unions).argmax())
        index = rows["index"][at].as_py()
        raise RecordError(
            f"row {index} of {run.folder} has {lengths[at]} two-mask labels, but its masks have {unions} unions; "
            f"delete {run.shard(index // run.batch).name} there and run the same command again to compute its rows anew"
        )


def _batches(run: Run, columns: Sequence[str], index: int | None = None) -> Iterator[pa.Table]:
    """The answered rows of each batch that is done, or the row of one image."""
    for batch in range(run.batches) if index is None else [index // run.batch]:
        if run.has(batch):
            rows = run.read_batch(batch, ["skipped", *columns])
            rows = rows.filter(compute.is_null(rows["skipped"]))
            yield rows if index is None else rows.filter(compute.equal(rows["index"], index))


def _flat(column: pa.ChunkedArray) -> NDArray[np.generic]:
    """The values of all lists of a column."""
    values: NDArray[np.generic] = column.combine_chunks().flatten().to_numpy(zero_copy_only=False)
    return values


def _sizes(run: Run) -> list[Size]:
    """The different sizes of the answered images."""
    sizes: dict[Size, None] = {}
    for rows in _batches(run, ["height", "width"]):
        sizes |= dict.fromkeys(zip(rows["height"].to_pylist(), rows["width"].to_pylist(), strict=True))
    return list(sizes)


def require_same_grid(run: Run, threat: Threat) -> None:
    """Refuse a threat on other pixels than those that the run's masks hide."""
    if threat.grid != run.threat.grid:
        raise RecordError(
            f"the masks of {run.folder} lie on the {run.threat.grid} grid, the threat on the {threat.grid} grid; "
            f"use grid={run.threat.grid!r}"
        )


def row_certified(run: Run, threat: Threat) -> Proportion:
    """Images certified against a smaller threat by the masks of the larger one.

    The masks need only cover the smaller threat, so the row certificate of core.algorithms.certification_flow
    holds with fewer good masks; for the run's own threat it is the stored answer.
    """
    require_same_grid(run, threat)
    return sum((_row_certified(part, threat) for part in _tables(run)), Proportion(0, 0))


def _row_certified(part: TableBatch, threat: Threat) -> Proportion:
    certified = np.ones(len(part.truth), dtype=bool)
    for masks, good in part.good_masks:
        hides = _placements(masks, threat)
        if not hides.any(axis=1).all():
            masks.require_cover(threat)  # names the patch that no mask hides
        chunks = np.array_split(good, max(1, len(good) * len(hides) // 50_000_000))
        certified &= np.concatenate([_covered(chunk, hides).all(axis=1) for chunk in chunks])
    return Proportion(int(certified.sum()), len(certified))


def _covered(good: Bools, hides: Bools) -> Bools:
    """[images, placements]: whether some good mask of the image hides the placement; eight masks at a time."""
    covered = np.zeros((len(good), len(hides)), dtype=bool)
    for good_bits, hide_bits in zip(np.packbits(good, axis=1).T, np.packbits(hides, axis=1).T, strict=True):
        covered |= (good_bits[:, None] & hide_bits) != 0
    return covered


def _placements(masks: MaskSet, threat: Threat) -> Bools:
    """[placements, masks]: which masks hide which patches; the hardest placements of K patches, or all of one.

    For one patch it is quicker to check every distinct position than to find the hardest.
    """
    if threat.count > 1:
        return masks.cover(threat).hides
    room = threat.room(masks.image)
    hides = [positions(masks.masks, shape, room)[2] for shape in threat.shapes(masks.image)]
    return np.concatenate([each.reshape(-1, len(masks)) for each in hides])


def _smaller_threats(run: Run, sizes: list[Size]) -> dict[int, Threat]:
    """Square patches by their side in px, up to the run's own (of different images' patches, the smallest)."""
    if run.threat.count > 1 or any(len(run.threat.shapes(size)) > 1 for size in sizes):
        return {}
    shapes = {run.threat.shapes(size)[0] for size in sizes}
    largest = min(min(shape) for shape in shapes)
    sides = np.unique(np.linspace(1, largest, min(MAX_SIDES, largest)).round().astype(int)).tolist()
    threats = {s: Threat.square(s, region=run.threat.region, grid=run.threat.grid) for s in sides}
    return threats | ({largest: run.threat} if shapes == {(largest, largest)} else {})


@dataclass(frozen=True)
class _Uncovered:
    """Where the proofs of some images do not cover a patch of one shape."""

    cells: Bools
    """[patterns, rows, columns]: images of one pattern of good masks fail at the same places."""
    heights: NDArray[np.intp]
    """How many pixels of top left corners each row of cells stands for."""
    widths: NDArray[np.intp]
    pattern: NDArray[np.intp]
    """The pattern of each image."""

    def counts(self) -> NDArray[np.float64]:
        """[rows, columns]: the number of images whose proof does not cover a patch with its corner at this pixel."""
        images = np.bincount(self.pattern, minlength=len(self.cells))
        counts = np.tensordot(images.astype(np.float64), self.cells, axes=1)
        return np.repeat(np.repeat(counts, self.heights, axis=0), self.widths, axis=1)

    def places(self) -> NDArray[np.float64]:
        """[images]: the number of uncovered corners of each image."""
        places = self.cells.astype(np.float64) @ self.widths @ self.heights
        return np.asarray(places[self.pattern], dtype=np.float64)


def _uncovered(part: TableBatch, threat: Threat, shape: Size) -> _Uncovered:
    """Where good masks do not hide a patch of this shape; of K patches, wherever the others are."""
    room = threat.room(part.masks.image)
    all_good = np.concatenate([good for _, good in part.good_masks], axis=1)
    ends = np.cumsum([len(masks) for masks, _ in part.good_masks])[:-1]  # one array for all sets, cut at these
    patterns, pattern = np.unique(all_good, axis=0, return_inverse=True)
    heights: NDArray[np.intp]
    widths: NDArray[np.intp]
    if threat.count > 1:
        cells = np.array([_hidden_by_several(part, threat, np.split(each, ends), shape) for each in patterns])
        heights, widths = (np.ones(side, dtype=np.intp) for side in cells.shape[1:])
    else:
        tops, lefts, hides = positions([m for masks, _ in part.good_masks for m in masks.masks], shape, room)
        by_set = zip(np.split(patterns, ends, axis=1), np.split(hides, ends, axis=2), strict=True)
        hidden = np.all([_covered(good, h.reshape(-1, h.shape[2])) for good, h in by_set], axis=0)
        cells = hidden.reshape(len(patterns), len(tops), len(lefts))
        heights = np.diff([*tops, room.bottom - shape[0] + 1])
        widths = np.diff([*lefts, room.right - shape[1] + 1])
    return _Uncovered(~cells, heights, widths, pattern.reshape(-1))


def _hidden_by_several(part: TableBatch, threat: Threat, goods: Sequence[Bools], shape: Size) -> Bools:
    maps = [m.hidden_positions(threat, good)[shape] for (m, _), good in zip(part.good_masks, goods, strict=True)]
    return np.asarray(np.all(maps, axis=0))


def _count_uncovered(part: TableBatch, threat: Threat, *, common: bool) -> NDArray[np.float64]:
    """[rows, columns]: the number of images whose good masks do not hide a patch with its corner there."""
    counts = _uncovered(part, threat, threat.shapes(part.masks.image)[0]).counts()
    if common:
        down, across = (np.arange(MAP_CELLS) * side // MAP_CELLS for side in counts.shape)
        counts = counts[down][:, across]
    return counts


def _share_uncovered(part: TableBatch, threat: Threat) -> list[float]:
    """Of each image, the share of places where its good masks do not hide a patch, of every shape."""
    shapes = [_uncovered(part, threat, shape) for shape in threat.shapes(part.masks.image)]
    total = sum(int(each.heights.sum() * each.widths.sum()) for each in shapes)
    shares: list[float] = (np.sum([each.places() for each in shapes], axis=0) / total).tolist()
    return shares


def unproved_corners(run: Run, index: int) -> NDArray[np.bool_]:
    """[rows, columns] of one image: whether its proof does not cover a patch with its top left corner at this pixel.

    Corners count from the top left of the threat's region. Of several patch shapes the first is meant.
    """
    (part,) = _tables(run, index)
    return _count_uncovered(part, run.threat, common=False) > 0


def verdicts(run: Run, defense: str, *, coarse: bool = False) -> tuple[Proportion, float]:
    """Clean accuracy of another recovery defense on the same tables, and its classifications per image.

    With `coarse`, the run's coarse masks are tried first.
    """
    _require_masked_images(run)
    counts = (_count_answers(part, defense, coarse=coarse) for part in _tables(run))
    return _accuracy(sum(counts, np.zeros(3, dtype=np.int64)))


def _accuracy(counts: NDArray[np.int64]) -> tuple[Proportion, float]:
    right, images, classifications = counts.tolist()
    return Proportion(right, images), classifications / max(images, 1)


def _count_answers(part: TableBatch, defense: str, *, coarse: bool) -> NDArray[np.int64]:
    """[3]: images answered correctly, images, and classifications of all of them."""
    counts, left = np.zeros(3, dtype=np.int64), np.ones(len(part.truth), dtype=bool)
    if coarse and part.coarse_labels is not None:
        counts[2] += part.coarse_labels.size
        agreed = (part.coarse_labels == part.coarse_labels[:, :1]).all(axis=1)
        counts += [(part.coarse_labels[agreed, 0] == part.truth[agreed]).sum(), agreed.sum(), 0]
        left = ~agreed
    size = len(part.masks)
    labels = part.labels[:, :size]
    agreed = left & (labels == labels[:, :1]).all(axis=1)  # most images; every algorithm gives them the same answer
    counts += [(labels[agreed, 0] == part.truth[agreed]).sum(), agreed.sum(), size * agreed.sum()]
    for n in np.flatnonzero(left & ~agreed):
        verdict = VERDICTS[defense](labels[n].tolist(), part.labels[n][part.masks.unions.index].tolist())
        counts += [verdict.label == part.truth[n], 1, verdict.classifications]
    return counts


def detection(run: Run, thresholds: Sequence[float]) -> list[Detection]:
    """Minority Reports at each threshold, from the stored one-mask labels and confidences.

    The alert fires if some mask contradicts the undefended label with confidence above the threshold, so the
    largest such confidence decides. An image is certified for detection if the smallest confidence in the true
    label, under any mask, is above it, and the undefended label is right.
    """
    _require_masked_images(run)
    if run.job["precision"] == "fast":
        raise RecordError(
            "Minority Reports compares confidences, which runs of --precision fast do not have; certify with exact"
        )
    images, counts = 0, np.zeros((len(thresholds), 3), dtype=np.int64)
    for rows in _batches(run, ["label", "undefended", "one_mask_labels", "one_mask_confidences"]):
        contradiction, agreement, right = _confidences(rows)
        images += len(rows)
        for k, threshold in enumerate(thresholds):
            alert = contradiction > threshold
            counts[k] += [(right & ~alert).sum(), (right & (agreement > threshold)).sum(), alert.sum()]
    return [
        Detection(threshold, *(Proportion(count, images) for count in each))
        for threshold, each in zip(thresholds, counts.tolist(), strict=True)
    ]


def _confidences(rows: pa.Table) -> tuple[NDArray[np.float64], NDArray[np.float64], Bools]:
    """Per image: the highest confidence of a mask against the undefended label (-inf: no mask contradicts it),
    the lowest confidence in the true label (-inf: some mask has another label), and whether undefended is right.
    """
    undefended, truth = rows["undefended"].to_numpy(), rows["label"].to_numpy()
    if not len(rows):
        return np.zeros(0), np.zeros(0), undefended == truth
    # Images may have different numbers of masks, so the masks of all images are in one row.
    masks = compute.list_value_length(rows["one_mask_labels"]).to_numpy()
    labels, confidences = (_flat(rows[name]) for name in ("one_mask_labels", "one_mask_confidences"))
    starts = np.concatenate([[0], np.cumsum(masks)[:-1]])
    never = np.float32(-np.inf)
    against = np.maximum.reduceat(np.where(labels != np.repeat(undefended, masks), confidences, never), starts)
    within = np.minimum.reduceat(np.where(labels == np.repeat(truth, masks), confidences, never), starts)
    # float64 like the threshold, since the live defense compares them so.
    return against.astype(np.float64), within.astype(np.float64), undefended == truth
