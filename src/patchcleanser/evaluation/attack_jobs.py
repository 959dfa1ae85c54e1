"""AttackJob: what decides the rows of attacked images, and how they are computed, undefended and defended."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import Any

import pyarrow as pa
from torch import Tensor

from patchcleanser.attacks import ADAPTIVE, ATTACKS, AdaptiveAttack
from patchcleanser.attacks.adaptive import AdaptiveResult, defense_on_grid, is_certified, is_fooled
from patchcleanser.attacks.patch_attack import AttackSettings, image_on_grid, require_gradients
from patchcleanser.core.results import Verdict
from patchcleanser.defenses.defense import Examination
from patchcleanser.errors import InputError
from patchcleanser.evaluation.class_names import count_classes
from patchcleanser.evaluation.dataset_jobs import RunJob
from patchcleanser.evaluation.jobs import Job
from patchcleanser.evaluation.rows import LoadedBatch, audit_seed, clean_columns
from patchcleanser.evaluation.saved_images import ATTACKED, as_png, picture_name, save_picture
from patchcleanser.evaluation.workloads import Batch, BatchWorkload
from patchcleanser.records.metrics import Proportion, summary
from patchcleanser.records.run import Row, Run

SAVED_IMAGES = 64
"""The first images of a run whose pictures are saved; so is every image whose defense was fooled."""


@dataclass(frozen=True)
class AttackJob(RunJob):
    """What to attack, how, and with which budget. Attack jobs of equal identity have equal rows."""

    job: Job
    attack: str = "apgd"
    settings: AttackSettings = field(default_factory=AttackSettings)

    def __post_init__(self) -> None:
        if not isinstance(self.job, Job):
            raise InputError(f"an attack job wraps a Job: AttackJob(Job(…)), got {type(self.job).__name__}")
        if self.attack not in ATTACKS:
            raise InputError.unknown("attack", self.attack, ATTACKS)
        if not isinstance(self.settings, AttackSettings):
            raise InputError(f"settings are AttackSettings(iterations=…, …), got {self.settings!r}")
        if self.attack != ADAPTIVE and ATTACKS[self.attack].load().needs_gradients:
            require_gradients(self.job.classifier)
        if self.attack == ADAPTIVE and self.settings.places == "searched":
            raise InputError("the adaptive attack chooses its places itself, where the proof is weakest")

    @property
    def base(self) -> Job:
        return self.job

    @property
    def title(self) -> str:
        """Attack and threat."""
        return f"{self.attack}, {self.job.threat}"

    @cached_property
    def identity(self) -> dict[str, Any]:
        """Everything that decides the rows, as plain values."""
        budget = asdict(replace(self.settings, chunk=None))
        return {**self.job.identity, "kind": "attack", "attack": self.attack, "settings": budget, "table": False}

    def workload(self, *, skip: bool = False) -> AttackWorkload:
        """The batches to attack."""
        return AttackWorkload(self, skip)


class AttackWorkload(BatchWorkload[AttackJob, tuple[list[Row], dict[str, bytes]]]):
    """Batches of images to attack, into rows and pictures."""

    sizes = (64, 4)

    def check(self) -> None:
        if self.job.settings.target is not None:
            count_classes(self.job.job.classifier, self.job.job.dataset)
            self.job.settings.require_target(self.job.job.classifier.classes)
        super().check()

    def process(self, task: Batch, read: LoadedBatch) -> tuple[list[Row], dict[str, bytes]]:
        return attack_rows(self.job, read, task.entropy)

    def write(self, run: Run, task: Batch, result: tuple[list[Row], dict[str, bytes]]) -> None:
        rows, pictures = result
        for name, content in pictures.items():  # before the rows: a batch that has rows is complete
            save_picture(run, name, content)
        run.write(task.number, rows)


def attack_rows(job: AttackJob, batch: LoadedBatch, entropy: int = 0) -> tuple[list[Row], dict[str, bytes]]:
    """The rows of a batch, and the pictures to save: PNG files by name. Images of the target class are skipped."""
    started = time.monotonic()
    pairs: list[tuple[Row, Tensor]] = []
    for row, image in zip(batch.readable, batch.images, strict=True):
        if row["label"] == job.settings.target:
            row["skipped"] = f"its true label is the target, {job.settings.target}"
        else:
            pairs.append((row, image))
    if not pairs:
        return batch.rows, {}
    images, labels = [image for _, image in pairs], [row["label"] for row, _ in pairs]
    defense = job.job.masking
    defense.reset(audit_seed(job.job, batch, entropy))  # so that no batch's rows depend on the batches before it
    examined = defense.examine(images, labels)
    attacked = _attack_images(job, images, labels, examined)
    seconds = (time.monotonic() - started) / len(pairs)
    pictures: dict[str, bytes] = {}
    for (row, image), clean, results in zip(pairs, examined, attacked, strict=True):
        worst = min(results, key=lambda result: (not result.fooled, result.attacked.margin))
        row.update(clean_columns(clean), **_attack_columns(clean, results, worst, row["label"]), seconds=seconds)
        if row["index"] < SAVED_IMAGES or worst.fooled:
            pictures[picture_name(row["index"])] = as_png(image_on_grid(image, job.job.classifier, job.job.threat))
            pictures[picture_name(row["index"], ATTACKED)] = as_png(worst.attacked.image)
    return batch.rows, pictures


def _attack_images(
    job: AttackJob, images: Sequence[Tensor], labels: Sequence[int], examined: Sequence[Examination[Any, Any]]
) -> list[list[AdaptiveResult]]:
    """Every attacked version of each image, with the defense's verdict on it."""
    defense = job.job.masking
    if job.attack == ADAPTIVE:
        return [[result] for result in AdaptiveAttack(defense, job.settings).challenge(images, labels)]
    attack = ATTACKS[job.attack].load()
    candidates = attack(defense.classifier, defense.threat, job.settings).candidates(images, labels)
    verdicts = iter(defense_on_grid(defense).predict([c.image for versions in candidates for c in versions]))
    results: list[list[AdaptiveResult]] = []
    for versions, label, clean in zip(candidates, labels, examined, strict=True):
        judged = [(version, next(verdicts)) for version in versions]
        certified = is_certified(clean.certificate)
        results.append([AdaptiveResult(v, verdict, is_fooled(verdict, label), certified) for v, verdict in judged])
    return results


def _attack_columns(
    clean: Examination[Any, Any], results: Sequence[AdaptiveResult], worst: AdaptiveResult, label: int
) -> Row:
    """Columns of one attacked image. The attacker may choose the clean image, so an error there counts as fooled."""
    verdict = worst.verdict
    return {
        "undefended_fooled": clean.undefended != label or any(r.attacked.label != label for r in results),
        "fooled": is_fooled(clean.verdict, label) or worst.fooled,
        "attacked_undefended": worst.attacked.label,
        "attacked_answer": verdict.label,
        "attacked_alert": getattr(verdict, "alert", None),
        "attacked_case": verdict.case.value if isinstance(verdict, Verdict) else None,
        "patches": [n for window in worst.attacked.windows for n in window.numbers],
        "margin": worst.attacked.margin,
        "queries": sum(r.attacked.queries for r in results),
    }


def attack_shares(rows: pa.Table) -> dict[str, Proportion]:
    """What share of the images each column of an attack run holds for, by a name to print."""
    shares = summary(rows).shares
    return {"undefended clean": shares.pop("undefended"), **{n.replace("_", " "): s for n, s in shares.items()}}
