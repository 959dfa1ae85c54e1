"""Audit: do the rows of a run follow from its model and data, and do its certificates hold under attack?"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from copy import copy
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor, nn

from patchcleanser.attacks import AdaptiveAttack
from patchcleanser.attacks.patch_attack import AttackSettings
from patchcleanser.classifiers.classifier import Classifier
from patchcleanser.classifiers.registry import as_classifier
from patchcleanser.core.geometry import Size
from patchcleanser.data.dataset import Dataset, DatasetView, Subset
from patchcleanser.data.inputs import as_dataset
from patchcleanser.defenses import DEFENSES
from patchcleanser.errors import DataError, InputError, RecordError
from patchcleanser.evaluation.class_names import match_labels
from patchcleanser.evaluation.dataset_jobs import init_fields
from patchcleanser.evaluation.jobs import Job
from patchcleanser.evaluation.multilabel_jobs import MultiLabelJob
from patchcleanser.evaluation.reference import (
    REFERENCES,
    Bools,
    ReferenceClassifier,
    ReferenceLabel,
    hidden_pixels,
    hiding_sets,
)
from patchcleanser.evaluation.workloads import LocalRunner, Runner, Workload
from patchcleanser.records.atomic import require_inside, whole_file
from patchcleanser.records.audits import AUDIT, sign
from patchcleanser.records.run import Row, Run

ATTACK_BATCH = 16
"""Images attacked at once on a CPU; a GPU takes 16 times as many."""

Difference = tuple[str, Any, Any, bool]
"""What differs, the stored value, the reference's value, and whether rounding explains it."""


@dataclass
class Audit:
    """What an audit examined, and what it found."""

    rows: int
    derived: list[int] = field(default_factory=list)
    """Indices of the images whose rows were derived again."""
    attacked: list[int] = field(default_factory=list)
    """Indices of the certified images that were attacked."""
    labels: int = 0
    """Classifications by the reference."""
    contradictions: list[dict[str, Any]] = field(default_factory=list)
    near_ties: list[dict[str, Any]] = field(default_factory=list)
    """Images, and differences, whose margin is so small that rounding decides. They are reported but do not fail."""
    notes: list[str] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return dict(vars(self))

    def add(self, part: Audit, folder: Path) -> None:
        """Add the result of one task. Attacked images that fooled the defense are saved in the folder."""
        self.derived += part.derived
        self.attacked += part.attacked
        self.labels += part.labels
        self.near_ties += part.near_ties
        for entry in part.contradictions:
            if "image" in entry:
                path = folder / f"fooled-{entry['index']}.npy"
                with whole_file(path) as unfinished, unfinished.open("wb") as file:
                    np.save(file, entry["image"])
                entry["image"] = str(path)
            self.contradictions.append(entry)


def audited_job(run: Run, classifier: Classifier | nn.Module | str, dataset: Any) -> Job:
    """The job of a finished run, with its model and images as Job takes them. RecordError if they are not the run's.

    The run's images are found in the dataset by their ids, so how they were chosen does not matter.
    """
    classifier, dataset = as_classifier(classifier), as_dataset(dataset)
    if run.kind != "certify":
        raise RecordError(f"{run.folder} holds no certificates to audit, but a run of kind {run.kind!r}")
    reference_of(run)
    require_finished(run)
    masks, stride = (tuple(pair) if pair else None for pair in (run.job["masks"], run.job["stride"]))
    job = Job(
        classifier,
        _images_of(run, classifier, dataset),
        run.threat,
        defense=run.job["defense"],
        masks=masks,
        stride=stride,
        precision=run.job["precision"],
        table=run.job["table"],
        options=run.job["options"],
    )
    require_auditable(run, classifier, job.identity)
    return job


def require_finished(run: Run) -> None:
    """RecordError if batches are missing, or the outcome cannot be written."""
    if not run.finished:
        raise RecordError(
            f"{run.folder} is not finished: {len(run.missing())} of {run.batches} batches are missing; "
            "finish it with the command that began it"
        )
    require_inside(run.folder / "audit", run.folder)  # where the outcome is written


def require_auditable(run: Run, classifier: Classifier, identity: Mapping[str, Any]) -> None:
    """RecordError if model or data are not those of the run."""
    for name, fix in (
        ("classifier", "model: give its own with --model, or pass it to audited_job"),
        ("data", "data: give its own with --data, --root, or pass them to audited_job"),
    ):
        if run.job[name] not in (identity[name], name == "classifier" and _without_code(classifier)):
            raise RecordError(
                f"{run.folder} was made with another {fix}; its fingerprint is {run.job[name][:12]}…, "
                f"got {identity[name][:12]}…"
            )


def _without_code(classifier: Classifier) -> str:
    """The fingerprint of a classifier as if no file had built it.

    A run of a module in Python has this one: it hashes the weights, the layers and their settings, but no file. So what
    a `python:` name returns is compared with it as thoroughly as the module itself would be.
    """
    plain = copy(classifier)
    plain.code = ""
    return plain.fingerprint


def reference_of(run: Run) -> str:
    """Name of the reference algorithm of the run's defense."""
    name = run.job["defense"]
    reference = DEFENSES[name].reference if name in DEFENSES else None
    if reference is None:
        auditable = ", ".join(name for name, entry in DEFENSES.items() if entry.reference)
        raise RecordError(f"{run.folder} was made by {name}, which cannot be audited; {auditable} can")
    return reference


def picks_of(run: Run, dataset: Dataset | DatasetView) -> list[int]:
    """The numbers of the run's images in a dataset, by their ids."""
    ids = run.read(["id"])["id"].to_pylist()
    at = {dataset.id(n): n for n in range(len(dataset))}
    missing = [name for name in ids if name not in at]
    if missing:
        raise RecordError(f"{run.folder} has {len(missing)} images that {dataset.name} has not, such as {missing[0]}")
    return [at[name] for name in ids]


def _images_of(run: Run, classifier: Classifier, dataset: Dataset) -> Dataset:
    """The run's images, under the dataset's own class numbers or, if the run used these, the classifier's."""
    picks = picks_of(run, dataset)

    def picked(numbered: Dataset) -> Dataset:
        in_order = picks == list(range(len(numbered)))
        return numbered if in_order else Subset(numbered, np.array(picks, dtype=np.intp))

    images = picked(dataset)
    if images.fingerprint != run.job["data"]:
        with suppress(DataError, InputError):
            images = picked(match_labels(dataset, classifier, "name")[0])
    return images


@dataclass(frozen=True)
class AuditTask:
    """One row to derive again, or some rows whose images are attacked at once."""

    number: int
    rows: list[Row]
    attack: bool


@dataclass(frozen=True)
class AuditWorkload(Workload[AuditTask, Audit]):
    """Rows of a run to check."""

    run: Run
    job: Job
    settings: AttackSettings

    def __getstate__(self) -> dict[str, Any]:
        return init_fields(self)

    def read(self, task: AuditTask) -> list[Tensor]:
        return [self.job.dataset.image(row["index"]) for row in task.rows]

    @cached_property
    def checker(self) -> RowChecker:
        """Shared by all tasks, because it builds the masks of each image size once."""
        return RowChecker(self.run, self.job)

    def process(self, task: AuditTask, read: list[Tensor]) -> Audit:
        result = Audit(rows=0)
        if task.attack:
            self.attack(task.rows, read, result)
        else:
            for row, image in zip(task.rows, read, strict=True):
                self.checker.check(row, image, result)
        return result

    def attack(self, rows: list[Row], images: list[Tensor], result: Audit) -> None:
        """Attack certified images, knowing the defense. A fooled one is a contradiction, with its patches and pixels.

        Pixels are float32 [C, H, W] on the threat's grid.
        """
        attacks = AdaptiveAttack(self.job.masking, self.settings).challenge(images, [row["label"] for row in rows])
        for row, attack in zip(rows, attacks, strict=True):
            result.attacked.append(row["index"])
            if attack.fooled:
                windows = [list(window.numbers) for window in attack.attacked.windows]
                entry = contradiction(row, "a certified image was fooled", row["label"], attack.verdict.label)
                result.contradictions.append({**entry, "patches": windows, "image": attack.attacked.image.numpy()})


def audit(
    run: Run,
    job: Job | MultiLabelJob,
    *,
    sample: int = 50,
    attack: int = 10,
    settings: AttackSettings | None = None,
    on_progress: Callable[[int, int, str], None] | None = None,
    runner: Runner | None = None,
    workload: type[AuditWorkload] | None = None,
) -> Audit:
    """Read all rows, derive `sample` of them again, and attack `attack` certified images.

    Reading raises if rows are not as they were written, or contradict themselves. The seed of the settings decides
    which rows are derived and attacked. `workload` is MultiLabelAudit for images of several labels. `on_progress` gets
    the images done, their total, and a status text.
    """
    runner, settings = runner or LocalRunner(), settings or AttackSettings(iterations=50, locations=2)
    work, rows = (workload or AuditWorkload)(run, job, settings), run.read().to_pylist()  # type: ignore[arg-type]
    identity = runner.begin(work)
    result = Audit(rows=len(rows), notes=_notes(run, identity))
    attack_batch = ATTACK_BATCH * (16 if identity["device"] == "cuda" else 1)
    readable = [row for row in rows if row["skipped"] is None]
    tasks = _tasks(readable, sample, attack, settings.seed, attack_batch)
    parts: dict[int, Audit] = {}
    for task, part in runner.results(work, tasks):
        parts[task.number] = part
        if on_progress is not None:
            done = sum(len(part.derived) + len(part.attacked) for part in parts.values())
            contradictions = sum(len(part.contradictions) for part in parts.values())
            on_progress(done, sum(len(task.rows) for task in tasks), f"{contradictions} contradictions")
    for task in tasks:  # in their order, wherever and whenever they were done
        result.add(parts[task.number], run.folder / "audit")
    return result


def _tasks(rows: list[Row], sample: int, attack: int, seed: int, attack_batch: int) -> list[AuditTask]:
    """Rows to derive, one by one, then certified images to attack, some at once."""
    generator = np.random.default_rng(seed)

    def choose(rows: list[Row], number: int) -> list[Row]:
        return [rows[i] for i in sorted(generator.permutation(len(rows))[:number].tolist())]

    derived = choose(rows, sample)
    targets = choose([row for row in rows if _promises(row)], attack)
    groups = [[row] for row in derived] + [targets[i : i + attack_batch] for i in range(0, len(targets), attack_batch)]
    return [AuditTask(number, group, number >= len(derived)) for number, group in enumerate(groups)]


def _promises(row: Row) -> bool:
    """Whether a row promises anything that an attack can refute."""
    if "certified_true" in row:
        return bool(row["certified_true"][0] > 0)
    return bool(row["row_certified"] or row["detection_certified"])


def _notes(run: Run, identity: dict[str, Any]) -> list[str]:
    notes = [run.unchecked] if run.unchecked else []
    for name in ("device", "labels", "scores"):
        if identity.get(name) != run.job.get(name):
            notes.append(f"{name}: the run says {run.job.get(name)}, this audit {identity.get(name)}")
    if run.job["precision"] == "fast":
        notes.append("the run's labels are fast ones; the audit's are float32")
    return notes


def contradiction(row: Row, what: str, stored: Any, expected: Any) -> dict[str, Any]:
    """A row, and what differs in it."""
    image = {"index": row["index"], "id": row["id"], "label": row.get("label", row.get("classes"))}
    return {**image, "what": what, "stored": stored, "found": expected}


class RowChecker:
    """Compares rows with the reference, image by image."""

    def __init__(self, run: Run, job: Job) -> None:
        self.run, self.job = run, job
        self.algorithm = reference_of(run)
        self.sizes: dict[Size, list[tuple[list[Bools], list[frozenset[int]]]]] = {}

    def masks(self, size: Size) -> list[tuple[list[Bools], list[frozenset[int]]]]:
        """Hidden pixels of each mask, and for every placement the masks that hide it; built once for each size.

        Those of the run's masks, then those of its coarse masks, if it has any.
        """
        if size not in self.sizes:
            self.sizes[size] = []
            for masks in filter(None, (self.run.mask_set(size), self.run.coarse_mask_set(size))):
                hidden = [hidden_pixels(mask, size) for mask in masks.masks]
                self.sizes[size].append((hidden, hiding_sets(hidden, self.run.threat, size)))
        return self.sizes[size]

    def check(self, row: Row, image: Tensor, result: Audit) -> None:
        """Derive one row again, and add every difference to the result."""
        sets, grid = self.masks((row["height"], row["width"])), self.run.threat.grid
        reference, *coarse = (ReferenceClassifier(self.job.classifier, image, hidden, grid=grid) for hidden, _ in sets)
        hiding = [needed for _, needed in sets]
        detects = self.algorithm == "minority_reports"
        outcome = self._detection(row, reference) if detects else self._recovery(row, [reference, *coarse], hiding)
        differences = [*self._labels(row, reference), *outcome]
        for number, label in enumerate(coarse[0].one_mask() if coarse else ()):
            differences += _compare(f"coarse label {number}", row["coarse_labels"][number], label)
        if row["certified"] and any(frozenset() in needed for needed in hiding):
            uncovered = "the masks do not cover the threat"
            differences.append((uncovered, row["certified"], "a patch that none hides", False))
        for what, stored, expected, near in differences:
            (result.near_ties if near else result.contradictions).append(contradiction(row, what, stored, expected))
        ties = sum(labels.near_ties for labels in (reference, *coarse))
        if ties and not any(near for *_, near in differences):
            result.near_ties.append(contradiction(row, "labels that rounding may change", ties, "no difference"))
        result.derived.append(row["index"])
        result.labels += sum(1 + len(labels.by_pixels) for labels in (reference, *coarse))

    def _labels(self, row: Row, reference: ReferenceClassifier) -> Iterator[Difference]:
        truth, size = int(self.job.labels[row["index"]]), [row["height"], row["width"]]
        if row["label"] != truth:
            yield "label", row["label"], truth, False
        if size != list(reference.image.shape[1:]):
            yield "size", size, list(reference.image.shape[1:]), False
        yield from _compare("undefended", row["undefended"], reference.unmasked)
        for i, label in enumerate(reference.one_mask()):
            yield from _compare(f"one-mask label {i}", row["one_mask_labels"][i], label)
        if row["table"] is not None:
            index = self.run.mask_set((row["height"], row["width"])).unions.index
            for i in range(len(reference.hidden)):
                for j in range(i + 1, len(reference.hidden)):
                    yield from _compare(f"two-mask label {i}, {j}", row["table"][index[i, j]], reference.under(i, j))
        if row["failing_pair"] is not None:
            label = reference.under(*row["failing_pair"])
            if label.label == row["label"]:
                yield "failing pair", row["failing_pair"], label.label, label.near_tie

    def _recovery(
        self, row: Row, references: list[ReferenceClassifier], hiding: list[list[frozenset[int]]]
    ) -> Iterator[Difference]:
        """Compare answer and certificates with the references', and with what rounding might make of them."""
        reference, *coarse = references
        labels = [label.label for label in reference.one_mask()]
        coarse_labels = {label.label for labels in coarse for label in labels.one_mask()}
        if len(coarse_labels) == 1:
            (answer,) = coarse_labels
        else:
            options = self.run.job["options"]
            answer = REFERENCES[self.algorithm](labels, lambda i, j: reference.under(i, j).label, options)
        if row["answer"] != answer:
            yield "answer", row["answer"], answer, any(labels.near_ties for labels in references)
        truth = row["label"]

        def good_masks(correct: Callable[[ReferenceLabel], bool]) -> list[set[int]]:
            """Masks with only correct labels in their rows, and coarse masks of correct labels."""
            alone = [{i for i, label in enumerate(labels.one_mask()) if correct(label)} for labels in coarse]
            return [reference.masks_where(correct), *alone]

        correct = good_masks(lambda label: label.label == truth)
        fewest = good_masks(lambda label: label.label == truth and not label.near_tie)
        most = good_masks(lambda label: label.may_be(truth))
        certificates: dict[str, Callable[[list[set[int]]], bool]] = {
            "certified": lambda good: [len(masks) for masks in good] == [len(labels.hidden) for labels in references],
            "row_certified": lambda good: all(
                masks & needed for masks, sets in zip(good, hiding, strict=True) for needed in sets
            ),
        }
        for name, holds in certificates.items():
            if row[name] != holds(correct):
                yield name, row[name], holds(correct), row[name] in (holds(fewest), holds(most))

    def _detection(self, row: Row, reference: ReferenceClassifier) -> Iterator[Difference]:
        threshold, labels = self.run.job["options"].get("threshold", 0.5), reference.one_mask()
        undefended = reference.unmasked.label
        near = reference.near_ties > 0 or any(abs(label.confidence - threshold) < 1e-3 for label in labels)
        alert = any(label.label != undefended and label.confidence > threshold for label in labels)
        confident = all(label.label == row["label"] and label.confidence > threshold for label in labels)
        for name, value in (
            ("answer", undefended),
            ("alert", alert),
            ("detection_certified", confident and undefended == row["label"]),
        ):
            if row[name] != value:
                yield name, row[name], value, near


def _compare(what: str, stored: int, label: ReferenceLabel) -> Iterator[Difference]:
    if stored != label.label:
        yield what, stored, f"{label.label} by a margin of {label.margin:.3g}", label.may_be(stored)


def write_audit(result: Audit, run: Run, settings: AttackSettings, *, sample: int, attack: int) -> Path:
    """Write the outcome of an audit, signed, with everything needed to repeat it, into the run's folder."""
    path = run.folder / AUDIT
    content = {
        "run": str(run.folder),
        "key": run.key,
        **run.integrity,
        "job": run.job,
        "about": run.metadata,
        "sample": sample,
        "attack": attack,
        "settings": vars(settings),
        **result.to_json(),
    }
    content["signature"] = sign(content)
    with whole_file(path) as part:
        part.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return path
