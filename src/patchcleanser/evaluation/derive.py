"""From stored tables, without a model: other defenses, smaller patches, maps, thresholds.

Everything here is computed for many images at once and equals what the algorithms in defenses/
say of one image at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pyarrow import compute

from patchcleanser.core.covering import positions
from patchcleanser.core.masks import MaskSet
from patchcleanser.core.metrics import Derived, Detection, Share
from patchcleanser.core.records import Run
from patchcleanser.core.threats import Threat
from patchcleanser.core.verdicts import Verdict
from patchcleanser.defenses.challenger_masking import challenger_masking
from patchcleanser.defenses.double_masking import double_masking
from patchcleanser.defenses.minority_reports import ROUNDING
from patchcleanser.errors import RecordError

Bools = NDArray[np.bool_]

CELLS = 64
"""Maps of images of different sizes are laid over each other on this many cells per side."""


@dataclass(frozen=True)
class Tables:
    """Stored tables of images of one size: `labels[n, u]` is the label of image n under union u."""

    masks: MaskSet
    index: NDArray[np.int64]
    truth: NDArray[np.int32]
    labels: NDArray[np.int32]

    def good(self) -> Bools:
        """[images, masks]: masks whose whole row of two-mask labels is the true label."""
        wrong = self.labels != self.truth[:, None]
        return np.stack([~wrong[:, row].any(axis=1) for row in self.masks.unions.index], axis=1)


def tables(run: Run) -> Iterator[Tables]:
    """The stored tables, batch by batch and size by size, so that memory stays bounded."""
    if not run.job["table"]:
        raise RecordError(f"{run.folder} holds no two-mask tables; certify with --table")
    built: dict[tuple[int, int], MaskSet] = {}
    for batch in range(run.batches):
        if not run.shard(batch).is_file():
            continue
        rows = run.read_batch(batch, ["index", "skipped", "label", "height", "width", "table"])
        rows = rows.filter(compute.is_null(rows["skipped"]))
        sizes = list(zip(rows["height"].to_pylist(), rows["width"].to_pylist(), strict=True))
        for size in dict.fromkeys(sizes):
            masks = built.setdefault(size, run.mask_set(size))
            mine = rows.filter(pa.array([s == size for s in sizes]))
            yield Tables(
                masks,
                mine["index"].to_numpy(),
                mine["label"].to_numpy(),
                lists(mine["table"]).astype(np.int32, copy=False),
            )


def lists(column: pa.ChunkedArray) -> NDArray[np.generic]:
    """A column of lists of one length as an array [rows, length]."""
    flat = column.combine_chunks()
    values: NDArray[np.generic] = flat.flatten().to_numpy(zero_copy_only=False).reshape(len(flat), -1)
    return values


def row_certified(run: Run, threat: Threat) -> Share:
    """Images certified against a smaller threat by the masks of the larger one.

    The masks need only cover the smaller threat, so the row certificate of two_mask.certification
    holds with fewer good masks; for the run's own threat it is the stored answer.
    """
    hits = total = 0
    for part in tables(run):
        part.masks.require_cover(threat)
        hides = part.masks.cover(threat).hides
        for good in np.array_split(part.good(), max(1, len(part.index) * hides.size // 50_000_000)):
            hits += int((good.astype(np.float32) @ hides.T.astype(np.float32) > 0).all(axis=1).sum())
        total += len(part.index)
    return Share(hits, total)


def smaller(run: Run, largest: int = 12) -> list[tuple[int, Share]]:
    """The row certificate against ever smaller square patches, up to the run's own."""
    shape = run.job["threat"]["shape"]
    size = next(iter(tables(run))).masks.image
    shapes = run.threat.shapes(size)
    if run.threat.count > 1 or len(shapes) > 1:
        return []
    sides = np.unique(np.linspace(1, min(shapes[0]), min(largest, min(shapes[0]))).round().astype(int))
    found = []
    for side in sides.tolist():
        text = shape if side == shapes[0][0] == shapes[0][1] else f"{side}x{side}"
        threat = Threat.parse(text, region=run.threat.region, grid=run.threat.grid)
        found.append((side, row_certified(run, threat)))
    return found


def weakness(run: Run) -> NDArray[np.float64]:
    """[rows, columns]: share of the images whose proof does not reach a patch with its corner there.

    Corners count from the top left of the threat's region. Where images differ in size, relative
    places are laid over each other. Of several patch shapes the first is meant.
    """
    sums: NDArray[np.float64] | None = None
    total = 0
    sizes = {part.masks.image for part in tables(run)}
    for part in tables(run):
        reached = _reached(part, run.threat)
        if len(sizes) > 1:
            down, across = (np.arange(CELLS) * side // CELLS for side in reached.shape[1:])
            reached = reached[:, down][:, :, across]
        missed = (~reached).sum(axis=0, dtype=np.float64)
        sums = missed if sums is None else sums + missed
        total += len(reached)
    return np.zeros((1, 1)) if sums is None else sums / max(total, 1)


def _reached(part: Tables, threat: Threat) -> Bools:
    """[images, rows, columns] for each image, the corners of patches that its good masks hide."""
    room, shape = threat.room(part.masks.image), threat.shapes(part.masks.image)[0]
    good = part.good()
    if threat.count > 1:
        return np.stack([part.masks.hidden_positions(threat, g)[shape] for g in good])
    tops, lefts, hides = positions(part.masks.masks, shape, room)
    flat = hides.reshape(-1, len(part.masks)).astype(np.float32)
    cells = (good.astype(np.float32) @ flat.T > 0).reshape(-1, len(tops), len(lefts))
    heights = np.diff([*tops, room.bottom - shape[0] + 1])
    widths = np.diff([*lefts, room.right - shape[1] + 1])
    return np.repeat(np.repeat(cells, heights, axis=1), widths, axis=2)


Algorithm = Callable[[list[int], Callable[[int, int], int]], Verdict]

VERDICTS: dict[str, Algorithm] = {
    "double-masking": lambda one, pair: double_masking(one, lambda i: [pair(i, j) for j in range(len(one))]),
    "challenger-masking": lambda one, pair: challenger_masking(one, pair),
}


def verdicts(run: Run, defense: str) -> tuple[Share, float]:
    """Clean accuracy of another recovery defense on the same tables, and its classifications an image."""
    right = total = spent = 0
    for part in tables(run):
        for truth, labels in zip(part.truth, part.labels, strict=True):
            label, cost = _verdict(part.masks, labels, VERDICTS[defense])
            right, spent = right + int(label == truth), spent + cost
        total += len(part.index)
    return Share(right, total), spent / max(total, 1)


def _verdict(masks: MaskSet, labels: NDArray[np.int32], algorithm: Algorithm) -> tuple[int, int]:
    one = labels[: len(masks)]
    if (one == one[0]).all():  # most images; every algorithm says the same of them
        return int(one[0]), len(masks)
    known, index = labels.tolist(), masks.unions.index
    verdict = algorithm(known[: len(masks)], lambda i, j: known[index[i, j]])
    return verdict.label, verdict.classifications


def derive(run: Run) -> Derived | None:
    """All that a report shows beyond the rows themselves; None without stored tables."""
    if not run.job["table"] or not any(len(part.index) for part in tables(run)):
        return None
    exact = run.job["precision"] == "exact"
    return Derived(
        smaller=smaller(run),
        weakness=weakness(run),
        answers={name: verdicts(run, name) for name in VERDICTS},
        detection=detection(run, np.linspace(0, 1, 21).tolist()) if exact else [],
    )


def detection(run: Run, thresholds: Sequence[float]) -> list[Detection]:
    """Minority Reports at each threshold, from the stored one-mask labels and confidences.

    The alert fires if some mask contradicts the undefended label with confidence above the
    threshold; so the largest such confidence decides. An image is certified for detection if the
    smallest confidence in the true label, under any mask, is above it, and the undefended label is right.
    """
    if run.job["precision"] == "fast":
        raise RecordError("Minority Reports compares confidences, which fast labels lack; certify with exact ones")
    names = ["skipped", "label", "undefended", "one_mask_labels", "one_mask_confidences"]
    found = [Detection(t, Share(0, 0), Share(0, 0), Share(0, 0)) for t in thresholds]
    for batch in range(run.batches):
        if not run.shard(batch).is_file():
            continue
        rows = run.read_batch(batch, names)
        rows = rows.filter(compute.is_null(rows["skipped"]))
        against, within, right = _confidence(rows)
        for k, at in enumerate(found):
            alert = against > at.threshold
            sure = (within > at.threshold + ROUNDING) & right
            hits = (right & ~alert, sure, alert)
            clean, certified, alerts = (Share(int(h.sum()), len(h)) for h in hits)
            found[k] = replace(
                at,
                clean=at.clean + clean,
                detection_certified=at.detection_certified + certified,
                alerts=at.alerts + alerts,
            )
    return found


def _confidence(rows: pa.Table) -> tuple[NDArray[np.float32], NDArray[np.float32], Bools]:
    """Per image: the surest contradiction, the least sure right answer (or -inf), undefended right."""
    undefended, truth = rows["undefended"].to_numpy(), rows["label"].to_numpy()
    # One by one where images have different numbers of masks.
    labels = [np.asarray(v) for v in rows["one_mask_labels"].to_pylist()]
    sure = [np.asarray(v, dtype=np.float32) for v in rows["one_mask_confidences"].to_pylist()]
    against = [c[y != u].max(initial=-np.inf) for y, c, u in zip(labels, sure, undefended, strict=True)]
    within = [c.min() if (y == t).all() else -np.inf for y, c, t in zip(labels, sure, truth, strict=True)]
    return np.array(against, dtype=np.float32), np.array(within, dtype=np.float32), undefended == truth
