"""Empirical robust accuracy: attack every image of a job, ask the defense, keep a row for each."""

from __future__ import annotations

import io
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import pyarrow as pa
from torch import Tensor

from patchcleanser.attacks import ADAPTIVE, ATTACKS
from patchcleanser.attacks.adaptive import AdaptiveAttack, AdaptiveResult, defense_on_grid, is_certified, is_fooled
from patchcleanser.attacks.patch_attack import AttackSettings, image_on_grid, require_gradients
from patchcleanser.core.results import Verdict
from patchcleanser.data.codec import as_picture
from patchcleanser.defenses.defense import Examination
from patchcleanser.errors import InputError
from patchcleanser.evaluation.gallery import gallery_path
from patchcleanser.evaluation.jobs import Job, fields_of
from patchcleanser.evaluation.rows import Loaded, facts, seed_of
from patchcleanser.evaluation.workloads import Batch, BatchWorkload, Runner, Watch, run_workload
from patchcleanser.records.atomic import require_inside, whole_file
from patchcleanser.records.metrics import Proportion, summary
from patchcleanser.records.run import Row, Run

KEPT = 64
"""Pictures of so many first images are kept, and of every image whose defense was fooled."""


@dataclass(frozen=True)
class AttackJob:
    """What to attack, how, and with which budget. Two with the same identity have the same rows."""

    job: Job
    attack: str = "apgd"
    settings: AttackSettings = field(default_factory=AttackSettings)

    def __post_init__(self) -> None:
        if self.attack not in ATTACKS:
            raise InputError(f"no attack {self.attack!r}; there are {', '.join(ATTACKS)}")
        if self.attack != ADAPTIVE and ATTACKS[self.attack].load().needs_gradients:
            require_gradients(self.job.classifier)
        if self.attack == ADAPTIVE and self.settings.places == "searched":
            raise InputError("the adaptive attack chooses its places itself, where the proof is weakest")

    def __getstate__(self) -> dict[str, Any]:
        return fields_of(self)

    @cached_property
    def identity(self) -> dict[str, Any]:
        """Everything that decides the rows, as plain values."""
        budget = asdict(replace(self.settings, chunk=None))
        return {**self.job.identity, "kind": "attack", "attack": self.attack, "settings": budget, "table": False}


@dataclass(frozen=True)
class AttackedRows:
    """Rows of one batch, and the pictures of its images to keep: index, what the name ends with, PNG."""

    rows: list[Row]
    pictures: list[tuple[int, str, bytes]]


@dataclass(frozen=True)
class AttackWorkload(BatchWorkload[AttackedRows]):
    """Batches of images to attack, into rows and pictures."""

    attack: AttackJob
    skip: bool = False
    sizes = (64, 4)

    @property
    def job(self) -> Job:  # type: ignore[override]
        """What is attacked."""
        return self.attack.job

    @property
    def identity(self) -> dict[str, Any]:
        """The attack's."""
        return self.attack.identity

    def process(self, task: Batch, read: Loaded) -> AttackedRows:
        """Their rows and pictures."""
        return attacked_rows(self.attack, read, task.entropy)

    def write(self, run: Run, task: Batch, result: AttackedRows) -> None:
        """The pictures, then the rows: a batch that has rows is done."""
        for index, end, picture in result.pictures:
            path = gallery_path(run, index, end)
            require_inside(path.parent, run.folder)
            with whole_file(path) as part:
                part.write_bytes(picture)
        run.write(task.number, result.rows)


def attack_all(
    job: AttackJob,
    folder: str | Path,
    *,
    batch: int | None = None,
    skip: bool = False,
    metadata: Mapping[str, Any] | None = None,
    on_progress: Watch | None = None,
    runner: Runner | None = None,
) -> Run:
    """Attack every image, and keep the rows in a folder; a run that stopped goes on where it was."""
    return run_workload(
        AttackWorkload(job, skip), folder, batch=batch, metadata=metadata, on_progress=on_progress, runner=runner
    )


def attacked_rows(job: AttackJob, batch: Loaded, entropy: int = 0) -> AttackedRows:
    """The rows of a batch of images, and the pictures of some of them."""
    started = time.monotonic()
    read = zip([row for row in batch.rows if row["skipped"] is None], batch.images, strict=True)
    kept = [(row, image) for row, image in read if row["label"] != job.settings.target]
    for row in batch.rows:
        if row["skipped"] is None and row["label"] == job.settings.target:
            row["skipped"] = f"its true label is the target, {job.settings.target}"
    result = AttackedRows(batch.rows, [])
    if not kept:
        return result
    images, truths = [image for _, image in kept], [row["label"] for row, _ in kept]
    job.job.masking.reset(seed_of(job.job, batch, entropy))  # so that no batch's rows depend on the batches before it
    examined = job.job.masking.examine(images, truths)
    every = _challenges(job, images, truths, examined)
    seconds = (time.monotonic() - started) / len(kept)
    for (row, image), clean, found in zip(kept, examined, every, strict=True):
        worst = min(found, key=lambda c: (not c.fooled, c.attacked.margin))
        row.update({**facts(clean), **_attacked(clean, found, worst, row["label"]), "seconds": seconds})
        if row["index"] < KEPT or worst.fooled:
            clear = image_on_grid(image, job.job.classifier, job.job.threat)
            result.pictures.append((row["index"], "", _png(clear)))
            result.pictures.append((row["index"], "-attacked", _png(worst.attacked.image)))
    return result


def _png(pixels: Tensor) -> bytes:
    """8 bits, as the image and the patch have."""
    content = io.BytesIO()
    as_picture(pixels).save(content, format="PNG")
    return content.getvalue()


def _challenges(
    job: AttackJob, images: Sequence[Tensor], labels: Sequence[int], examined: Sequence[Examination[Any, Any]]
) -> list[list[AdaptiveResult]]:
    """For each image every attacked version, and what the defense says of it."""
    defense = job.job.masking
    if job.attack == ADAPTIVE:
        return [[found] for found in AdaptiveAttack(defense, job.settings).challenge(images, labels)]
    attack = ATTACKS[job.attack].load()
    candidates = attack(defense.classifier, defense.threat, job.settings).candidates(images, labels)
    answers = iter(defense_on_grid(defense).predict([found.image for mine in candidates for found in mine]))
    results: list[list[AdaptiveResult]] = []
    for mine, label, clean in zip(candidates, labels, examined, strict=True):
        asked = [(found, next(answers)) for found in mine]
        sure = is_certified(clean.certificate)
        results.append([AdaptiveResult(found, verdict, is_fooled(verdict, label), sure) for found, verdict in asked])
    return results


def _attacked(clean: Examination[Any, Any], every: Sequence[AdaptiveResult], worst: AdaptiveResult, label: int) -> Row:
    """The clean image itself is one the attacker may choose, so who is wrong there is fooled already."""
    verdict = worst.verdict
    undefended = clean.undefended
    return {
        "undefended_fooled": undefended != label or any(c.attacked.label != label for c in every),
        "fooled": is_fooled(clean.verdict, label) or worst.fooled,
        "attacked_undefended": worst.attacked.label,
        "attacked_answer": verdict.label,
        "attacked_alert": getattr(verdict, "alert", None),
        "attacked_case": verdict.case.value if isinstance(verdict, Verdict) else None,
        "patches": [n for window in worst.attacked.windows for n in window.numbers],
        "margin": worst.attacked.margin,
        "queries": sum(c.attacked.queries for c in every),
    }


def attack_shares(rows: pa.Table) -> dict[str, Proportion]:
    """What the rows of an attack show, in words. Detection has shares of its own."""
    shares = summary(rows).shares
    return {"undefended clean": shares.pop("undefended"), **{n.replace("_", " "): s for n, s in shares.items()}}
