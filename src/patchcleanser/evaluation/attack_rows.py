"""Rows of attacked images: empirical robust accuracy, undefended and defended."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import pyarrow as pa
from torch import Tensor

from patchcleanser.attacks import ADAPTIVE, ATTACKS, AdaptiveAttack
from patchcleanser.attacks.adaptive import AdaptiveResult, defense_on_grid, is_certified, is_fooled
from patchcleanser.attacks.patch_attack import image_on_grid
from patchcleanser.core.results import Verdict
from patchcleanser.defenses.defense import Examination
from patchcleanser.evaluation.jobs import AttackJob
from patchcleanser.evaluation.rows import LoadedBatch, audit_seed, clean_columns
from patchcleanser.evaluation.saved_images import ATTACKED, as_png, picture_name
from patchcleanser.records.metrics import Proportion, summary
from patchcleanser.records.run import Row

SAVED_IMAGES = 64
"""The first images of a run whose pictures are saved; so is every image whose defense was fooled."""


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
