"""What a run will cost: counted, and timed on a few real batches, before it works."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from patchcleanser.cli.options import RunnerOptions
from patchcleanser.cli.progress import resumed, shown, waiting
from patchcleanser.core.counts import counted
from patchcleanser.core.geometry import size_in_words
from patchcleanser.errors import DataError, ThreatError
from patchcleanser.records.provenance import MANIFEST
from patchcleanser.records.run import Run

if TYPE_CHECKING:
    from torch import Tensor

    from patchcleanser.core.geometry import Size
    from patchcleanser.core.threats import Threat
    from patchcleanser.defenses.mask_defense import MaskDefense
    from patchcleanser.evaluation import AttackJob, Job
    from patchcleanser.evaluation.multilabel_jobs import MultiLabelJob

    CertifyJob = Job | MultiLabelJob

SECONDS = 1.0
"""How long batches are timed."""
TIMED_SHARE = 0.05
"""Of a run's classifications; a short run is not worth a second of timing."""
LOOKED_AT = 20
"""Images that are tried to find one that can be read and has room for the patch."""
LONG_BATCH = 20.0
"""Seconds from which on it is said how long a batch takes."""
TIMED_ITERATIONS = (1, 3)
"""Iterations of two attacks on one image; the difference of their times is that of the steps between."""


@dataclass(frozen=True)
class Cost:
    """The most that a run may cost. Images whose labels disagree early cost less."""

    job: CertifyJob | AttackJob
    images: int
    """Those that are left."""
    classifications: int
    """Of one image."""
    patch: str
    steps: int = 0
    """Of an attack on one image."""
    seconds: float | None = None
    """Of all images that are left."""

    def __str__(self) -> str:
        total = self.job.identity["images"]
        if not self.images:
            return f"{'the image is' if total == 1 else f'all {total:,} images are'} done, nothing is left to compute"
        images = counted(total, "image") if self.images == total else f"{self.images:,} of {counted(total, 'image')}"
        steps = f" and {counted(self.steps, 'attack step')}" if self.steps else ""
        each = f"({counted(self.classifications, 'classification')}{steps})" if steps else None
        product = f"{images} × {each or counted(self.classifications, 'classification')}"
        fast = self.seconds is not None and self.job.identity["precision"] == "fast"
        now = "" if self.seconds is None else " at the speed measured now"
        return f"{product}, {self.patch}, {about(self.seconds)}{now}" + " (as exact labels; fast ones take less)" * fast

    def batch_note(self, folder: Path, batch: int | None) -> str | None:
        """How long a batch takes, if that is long: a stop loses as much."""
        stored = Run.open(folder).batch if (folder / MANIFEST).is_file() else None
        number = min(stored or batch or self.job.workload().batch_size(self.job.identity["device"]), self.images)
        seconds = (self.seconds or 0.0) / max(1, self.images) * number
        if seconds < LONG_BATCH:
            return None
        smaller = "" if stored or number == 1 else f"; with --batch {max(1, int(number * LONG_BATCH / seconds))} less"
        every = counted(number, "image")
        return f"rows are written after every {every}, so a stop loses {about(seconds)} of work{smaller}"

    def to_dict(self) -> dict[str, Any]:
        return {
            "run": self.job.title,
            "images": self.images,
            "classifications_per_image": self.classifications,
            "attack_steps_per_image": self.steps,
            "seconds": None if self.seconds is None else round(self.seconds, 1),
        }


def about(seconds: float | None) -> str:
    """A time in words, of two units at most.

    >>> about(0.2), about(250), about(9000), about(600_000)
    ('about 1 s', 'about 4 min', 'about 2 h 30 min', 'about 6 days 22 h')
    """
    if seconds is None:
        return "time unknown"
    if seconds < 100:
        return f"about {max(1, round(seconds))} s"
    minutes = round(seconds / 60)
    if minutes < 100:
        return f"about {minutes} min"
    hours, minutes = divmod(minutes, 60)
    if hours < 48:
        return f"about {hours} h {minutes} min"
    return f"about {hours // 24} days {hours % 24} h"


def announce(
    work: Sequence[tuple[CertifyJob | AttackJob, Path]],
    cluster: RunnerOptions,
    *,
    batch: int | None,
    dry_run: bool,
    as_json: bool,
) -> list[float | None]:
    """Say what the work will cost; the seconds of each run, or None where they are unknown."""
    if not (shown() or dry_run):
        return [None] * len(work)
    with waiting("timing a few batches"):
        estimates = [cost_of(job, resumed(job, folder), timed=cluster.on == "here") for job, folder in work]
    costs = [cost for cost in estimates if cost is not None and (cost.images or dry_run)]
    if dry_run and as_json:
        print(json.dumps([cost.to_dict() for cost in costs], indent=1))
    else:
        file = sys.stdout if dry_run else sys.stderr
        _print_costs(costs, file)
        notes = [cost.batch_note(folder, batch) for cost, (_, folder) in zip(estimates, work, strict=True) if cost]
        for note in list(dict.fromkeys(note for note in notes if note))[:1]:
            print(note, file=file)
    return [cost.seconds if cost else None for cost in estimates]


def _print_costs(costs: Sequence[Cost], file: TextIO) -> None:
    """A line for each run, and for several their sum."""
    for cost in costs:
        print(f"{cost.job.title}: {cost}" if len(costs) > 1 else cost, file=file)
    if len(costs) > 1:
        seconds = [cost.seconds for cost in costs]
        total = None if None in seconds else sum(s for s in seconds if s is not None)
        labels = sum(cost.images * cost.classifications for cost in costs)
        print(f"{len(costs)} runs: {labels:,} classifications, {about(total)}", file=file)


def cost_of(job: CertifyJob | AttackJob, done: int, *, timed: bool) -> Cost | None:
    """What is left of a job, with its time if it is worked on here; None if no image can be used."""
    from patchcleanser.evaluation import AttackJob

    attack, base = (job, job.job) if isinstance(job, AttackJob) else (None, job)
    sample = _first_usable(base, attack.settings.target if attack else None)
    if sample is None:
        return None
    image, label, size = sample
    left = len(base.dataset) - done
    steps, each = 0, 0.0  # attack steps and seconds of one image
    if base.has_masks:
        table = base.masking.empty_table(size)
        labels = 1 + (len(table.mask_set) if base.masking.may_alert else table.size)  # 1 is the unmasked image
        classifications = base.masking.passes or labels
        if timed and left:
            each = labels * seconds_per_label(base.masking, image, left * labels)
    else:
        classifications, each = _examined(base, image, label)
    if attack:
        budget = attack.settings
        steps = budget.iterations * budget.locations * budget.restarts
        each += seconds_of_attack(attack, image, label) if timed and left else 0.0
    return Cost(job, left, classifications, patch_on(base.threat, size), steps, each * left if timed else None)


def patch_on(threat: Threat, size: Size) -> str:
    """The patch in pixels, and its share of an image of this size."""
    shapes, image = threat.shapes(size), size_in_words(size)
    if len(shapes) > 1:
        return f"{threat} in {len(shapes)} shapes on {image}"
    height, width = shapes[0]
    patches = f"{height}×{width} patch" if threat.count == 1 else f"{threat.count} patches of {height}×{width}"
    return f"{patches} = {threat.count * height * width / (size[0] * size[1]):.1%} of {image}"


def seconds_per_label(defense: MaskDefense[Any, Any], image: Tensor, labels: int) -> float:
    """Time of one exact label, from real batches of one image after a first that warms up.

    If the first one takes long, it is the measure.
    """
    import numpy as np
    import torch

    from patchcleanser.engine.masking import PairBatch

    engine = defense.engine.exact.with_classifier(defense.classifier)  # a copy, with counters of its own
    state = defense.image_state(image)
    unions, size = np.arange(len(state.table.mask_set.unions)), engine.labels_at_once(state)
    copies = -(-size // len(unions))
    batch = PairBatch.of([state] * copies, [unions] * copies).part(0, size)
    first, seconds, count = True, 0.0, 0
    with torch.inference_mode():
        while first or (seconds < SECONDS and count < TIMED_SHARE * labels):
            started = time.perf_counter()
            engine.logits(batch).cpu()
            elapsed = time.perf_counter() - started
            if first and elapsed < SECONDS:
                first = False
                continue
            first, seconds, count = False, seconds + elapsed, count + len(batch)
    return seconds / count


def seconds_of_attack(job: AttackJob, image: Tensor, label: int) -> float:
    """Time of the attack on one image, from two attacks of fewer iterations."""
    from patchcleanser.attacks import ADAPTIVE, ATTACKS, AdaptiveAttack

    defense = job.job.masking
    first, second = TIMED_ITERATIONS
    times = []
    for iterations in (first, first, second):  # the first warms up
        settings, started = replace(job.settings, iterations=iterations), time.perf_counter()
        if job.attack == ADAPTIVE:
            AdaptiveAttack(defense, settings).challenge([image], [label])
        else:
            ATTACKS[job.attack].load()(defense.classifier, defense.threat, settings).candidates([image], [label])
        times.append(time.perf_counter() - started)
    step = max(0.0, times[2] - times[1]) / (second - first)
    return times[1] + step * (job.settings.iterations - first)


def _examined(job: CertifyJob, image: Tensor, label: Any) -> tuple[int, float]:
    """Classifications and time of one image by a defense without masks; the second time counts, if it is short."""
    seconds = 0.0
    for _ in range(2):
        started = time.perf_counter()
        (examination,) = job.built.examine([image], [label])
        seconds = time.perf_counter() - started
        if seconds > SECONDS:
            break
    return int(examination.verdict.classifications), seconds


def _first_usable(job: CertifyJob, target: int | None) -> tuple[Tensor, Any, Size] | None:
    """The first image that can be defended, and attacked, with its label and its size on the threat's grid."""
    for index in range(min(LOOKED_AT, len(job.dataset))):
        try:
            image = job.dataset.image(index)
            height, width = job.built.to_threat_grid(image).shape[-2:]
            job.built.check_size((height, width))
        except (DataError, ThreatError):
            continue
        if target is None or job.labels[index] != target:
            return image, job.labels[index], (height, width)
    return None
