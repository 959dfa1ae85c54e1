"""Audit: do the rows of a run follow from its model and data, and do its certificates hold under attack?"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from patchcleanser.attacks.adaptive import AdaptiveAttack
from patchcleanser.attacks.patch_attack import AttackSettings
from patchcleanser.classifiers.classifier import Classifier
from patchcleanser.core.cover import Mask
from patchcleanser.core.geometry import Size
from patchcleanser.data.dataset import Dataset, Subset
from patchcleanser.defenses import DEFENSES
from patchcleanser.errors import DataError, InputError, RecordError
from patchcleanser.evaluation.class_names import match_labels
from patchcleanser.evaluation.jobs import Job, fields_of
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
from patchcleanser.records.run import Row, Run

TOGETHER = 16
"""Images attacked side by side."""

Facts = dict[str, Any]
Watch = Callable[[int, int, str], None]


@dataclass
class Audit:
    """What an audit looked at and what it found."""

    rows: int
    derived: list[int] = field(default_factory=list)
    """Indices of the images whose rows were derived again."""
    attacked: list[int] = field(default_factory=list)
    """Indices of the certified images that were attacked."""
    labels: int = 0
    """Classifications by the slow twin."""
    contradictions: list[Facts] = field(default_factory=list)
    near_ties: list[Facts] = field(default_factory=list)
    """Differences, and images, where a margin is so small that rounding decides; reported, not counted as failures."""
    notes: list[str] = field(default_factory=list)

    def to_json(self) -> Facts:
        """Plain values."""
        return dict(vars(self))

    def add(self, part: Audit, folder: Path) -> None:
        """What a part of the work found; attacked images that fooled go into the folder."""
        self.derived += part.derived
        self.attacked += part.attacked
        self.labels += part.labels
        self.near_ties += part.near_ties
        for found in part.contradictions:
            kept = {"image": str(_keep(found["image"], found["index"], folder))} if "image" in found else {}
            self.contradictions.append({**found, **kept})


def audited_job(run: Run, classifier: Classifier, dataset: Dataset) -> Job:
    """The job of a finished run with the model and the images it names; RecordError if they are others.

    The run's images are found in the dataset by their names, so how they were chosen need not be known.
    """
    if run.job.get("kind", "certify") != "certify":
        raise RecordError(f"{run.folder} holds no certificates to audit, but a run of kind {run.job['kind']!r}")
    reference_of(run)
    if not run.finished:
        raise RecordError(
            f"{run.folder} is not finished: {len(run.missing())} of {run.batches} batches are missing; "
            "finish it with the command that began it"
        )
    require_inside(run.folder / "audit", run.folder)  # where the outcome is written
    pair = [tuple(v) if v else None for v in (run.job["masks"], run.job["stride"])]
    job = Job(
        classifier,
        _same_images(run, classifier, dataset),
        run.threat,
        defense=run.job["defense"],
        masks=pair[0],
        stride=pair[1],
        precision=run.job["precision"],
        table=run.job["table"],
        options=run.job["options"],
    )
    for name, word in (("classifier", "model: name it with --model"), ("data", "data: name them with --data, --root")):
        if job.identity[name] != run.job[name]:
            raise RecordError(
                f"{run.folder} was made with another {word}; its fingerprint is {run.job[name][:12]}…, "
                f"got {job.identity[name][:12]}…"
            )
    return job


def reference_of(run: Run) -> str:
    """The reference algorithm that the run's defense names."""
    name = run.job["defense"]
    reference = DEFENSES[name].reference if name in DEFENSES else None
    if reference is None:
        having = ", ".join(name for name, entry in DEFENSES.items() if entry.reference)
        raise RecordError(
            f"{run.folder} was made by {name}, which has no reference to audit it with; {having} have one"
        )
    return reference


def _same_images(run: Run, classifier: Classifier, dataset: Dataset) -> Dataset:
    """The run's images, found by their names, under the class numbers that it used."""
    ids = run.read(["id"])["id"].to_pylist()
    at = {dataset.id(n): n for n in range(len(dataset))}
    missing = [name for name in ids if name not in at]
    if missing:
        raise RecordError(f"{run.folder} has {len(missing)} images that {dataset.name} has not, such as {missing[0]}")
    picks = [at[name] for name in ids]
    for numbered in _numbered(classifier, dataset):
        found = numbered if picks == list(range(len(dataset))) else Subset(numbered, np.array(picks, dtype=np.intp))
        if found.fingerprint == run.job["data"]:
            break
    return found


def _numbered(classifier: Classifier, dataset: Dataset) -> Iterator[Dataset]:
    """The data under their own class numbers, or under the classifier's, where names match."""
    yield dataset
    with suppress(DataError, InputError):
        yield match_labels(dataset, classifier, "name")[0]


@dataclass(frozen=True)
class Part:
    """Some rows to derive again, or to attack side by side."""

    number: int
    rows: list[Row]
    attack: bool


@dataclass(frozen=True)
class AuditWorkload(Workload[Part, Audit]):
    """Rows of a run to look at, into what is found."""

    run: Run
    job: Job
    settings: AttackSettings

    @property
    def identity(self) -> Facts:
        """The job's."""
        return self.job.identity

    def __getstate__(self) -> Facts:
        return fields_of(self)

    def check(self) -> None:
        """A finished run worked once."""

    def read(self, task: Part) -> list[Tensor]:
        """The images."""
        return [self.job.dataset.image(row["index"]) for row in task.rows]

    @cached_property
    def checker(self) -> RowChecker:
        """Builds the masks of each size once."""
        return RowChecker(self.run, self.job)

    def process(self, task: Part, read: list[Tensor]) -> Audit:
        """What these rows show."""
        result = Audit(rows=0)
        if task.attack:
            _attack(self.job, task.rows, read, self.settings, result)
        else:
            for row, image in zip(task.rows, read, strict=True):
                self.checker.check(row, image, result)
        return result


def audit(
    run: Run,
    job: Job,
    *,
    sample: int = 50,
    attack: int = 10,
    settings: AttackSettings | None = None,
    on_progress: Watch | None = None,
    runner: Runner | None = None,
) -> Audit:
    """Read all rows, derive some again, and attack some certified images.

    Reading refuses rows that are not as they were written, and those that contradict themselves. Which ones are
    derived and attacked is decided by the seed of the settings.
    """
    runner, settings = runner or LocalRunner(), settings or AttackSettings(iterations=50, locations=2)
    work = AuditWorkload(run, job, settings)
    rows = run.read().to_pylist()
    kept = [row for row in rows if row["skipped"] is None]
    identity = runner.begin(work)
    result = Audit(rows=len(rows), notes=_notes(run, identity))
    together = TOGETHER * (16 if identity["device"] == "cuda" else 1)
    parts = _parts(kept, sample, attack, settings.seed, together)
    found: dict[int, Audit] = {}
    wrong = 0
    for part, here in runner.results(work, parts):
        found[part.number] = here
        wrong += len(here.contradictions)
        if on_progress is not None:
            looked = sum(len(p.rows) for p in parts if p.number in found and p.attack == part.attack)
            total = sum(len(p.rows) for p in parts if p.attack == part.attack)
            on_progress(looked, total, f"{'attacked' if part.attack else 'derived again'}; {wrong} contradictions")
    for part in parts:  # in their order, wherever and whenever they were done
        result.add(found[part.number], run.folder / "audit")
    return result


def _parts(rows: list[Row], sample: int, attack: int, seed: int, together: int) -> list[Part]:
    """What to look at: rows one by one, and certified images some together."""
    chance = np.random.default_rng(seed)
    chosen = _choice(rows, sample, chance)
    certified = [row for row in rows if row["row_certified"] or row["detection_certified"]]
    targets = _choice(certified, attack, chance)
    groups = [[row] for row in chosen] + [targets[at : at + together] for at in range(0, len(targets), together)]
    return [Part(number, group, number >= len(chosen)) for number, group in enumerate(groups)]


def _choice(rows: list[Row], number: int, chance: np.random.Generator) -> list[Row]:
    picks = chance.permutation(len(rows))[:number]
    return [rows[i] for i in sorted(picks.tolist())]


def _notes(run: Run, identity: Facts) -> list[str]:
    notes = [run.unchecked] if run.unchecked else []
    for name in ("device", "labels"):
        if identity[name] != run.job[name]:
            notes.append(f"{name}: the run says {run.job[name]}, this audit {identity[name]}")
    if run.job["precision"] == "fast":
        notes.append("the run's labels are fast ones; the audit's are float32")
    return notes


def _told(row: Row, what: str, stored: Any, found: Any) -> Facts:
    return {
        "index": row["index"],
        "id": row["id"],
        "label": row["label"],
        "what": what,
        "stored": stored,
        "found": found,
    }


class RowChecker:
    """Compares rows with the slow twin, image by image."""

    def __init__(self, run: Run, job: Job) -> None:
        self.run, self.job = run, job
        self.reference = reference_of(run)
        self.sizes: dict[Size, tuple[list[Bools], list[frozenset[int]]]] = {}

    def masks(self, size: Size) -> tuple[list[Bools], list[frozenset[int]]]:
        """Hidden pixels of each mask, and the masks that hide each placement; built once for each size."""
        if size not in self.sizes:
            windows: Sequence[Mask] = self.run.mask_set(size).masks
            hidden = [hidden_pixels(mask, size) for mask in windows]
            self.sizes[size] = hidden, hiding_sets(hidden, self.run.threat, size)
        return self.sizes[size]

    def check(self, row: Row, image: Tensor, result: Audit) -> None:
        """Derive one row again, and note every difference."""
        size = row["height"], row["width"]
        hidden, hiding = self.masks(size)
        twin = ReferenceClassifier(self.job.classifier, image, hidden, grid=self.run.threat.grid)
        differences = [*self._data(row, twin), *self._labels(row, twin), *self._promises(row, twin, hiding)]
        if row["certified"] and frozenset() in hiding:
            differences.append(
                ("the masks do not cover the threat", row["certified"], "a patch that none hides", False)
            )
        for what, stored, found, near in differences:
            (result.near_ties if near else result.contradictions).append(_told(row, what, stored, found))
        if twin.near_ties and not any(near for *_, near in differences):
            result.near_ties.append(_told(row, "labels that rounding may change", twin.near_ties, "no difference"))
        result.derived.append(row["index"])
        result.labels += 1 + len(twin.known)

    def _data(self, row: Row, twin: ReferenceClassifier) -> Iterator[tuple[str, Any, Any, bool]]:
        truth, shape = int(self.job.labels[row["index"]]), list(twin.image.shape[1:])
        if row["label"] != truth:
            yield "label", row["label"], truth, False
        if [row["height"], row["width"]] != shape:
            yield "size", [row["height"], row["width"]], shape, False

    def _labels(self, row: Row, twin: ReferenceClassifier) -> Iterator[tuple[str, Any, Any, bool]]:
        yield from _compare("undefended", row["undefended"], twin.plain)
        for i, seen in enumerate(twin.one()):
            yield from _compare(f"one-mask label {i}", row["one_mask_labels"][i], seen)
        if row["table"] is not None:
            index = self.run.mask_set((row["height"], row["width"])).unions.index
            for i in range(len(twin.hidden)):
                for j in range(i + 1, len(twin.hidden)):
                    yield from _compare(f"two-mask label {i}, {j}", row["table"][index[i, j]], twin.at(i, j))
        if row["failing_pair"] is not None:
            seen = twin.at(*row["failing_pair"])
            if seen.label == row["label"]:
                yield "failing pair", row["failing_pair"], seen.label, seen.near_tie

    def _promises(
        self, row: Row, twin: ReferenceClassifier, hiding: list[frozenset[int]]
    ) -> Iterator[tuple[str, Any, Any, bool]]:
        """Answer and certificates: as the twin has them, or as rounding might have made them."""
        truth = row["label"]
        if self.reference == "minority_reports":
            yield from self._detection(row, twin)
            return
        answer = self._answer(twin)
        if row["answer"] != answer:
            yield "answer", row["answer"], answer, twin.near_ties > 0
        sure = twin.good(lambda seen: seen.label == truth and not (seen.near_tie and seen.second != truth))
        likely, perhaps = twin.good(lambda seen: seen.label == truth), twin.good(lambda seen: seen.may_be(truth))
        everything = set(range(len(twin.hidden)))

        def covered(good: set[int]) -> bool:
            return all(good & masks for masks in hiding)

        for name, holds in (("certified", lambda good: good == everything), ("row_certified", covered)):
            if row[name] != holds(likely):
                yield name, row[name], holds(likely), row[name] in (holds(sure), holds(perhaps))

    def _answer(self, twin: ReferenceClassifier) -> int:
        one = [seen.label for seen in twin.one()]

        def pair(i: int, j: int) -> int:
            return twin.at(i, j).label

        return REFERENCES[self.reference](one, pair, self.run.job["options"])

    def _detection(self, row: Row, twin: ReferenceClassifier) -> Iterator[tuple[str, Any, Any, bool]]:
        threshold, ones = self.run.job["options"].get("threshold", 0.5), twin.one()
        near = twin.near_ties > 0 or any(abs(seen.confidence - threshold) < 1e-3 for seen in ones)
        alert = any(seen.label != twin.plain.label and seen.confidence > threshold for seen in ones)
        held = all(seen.label == row["label"] and seen.confidence > threshold for seen in ones)
        for name, found in (
            ("answer", twin.plain.label),
            ("alert", alert),
            ("detection_certified", held and twin.plain.label == row["label"]),
        ):
            if row[name] != found:
                yield name, row[name], found, near


def _compare(what: str, stored: int, seen: ReferenceLabel) -> Iterator[tuple[str, Any, Any, bool]]:
    if stored != seen.label:
        yield what, stored, f"{seen.label} by a margin of {seen.margin:.3g}", seen.may_be(stored)


def _attack(job: Job, rows: list[Row], images: list[Tensor], settings: AttackSettings, result: Audit) -> None:
    """Attack certified images as one who knows the defense; whoever is fooled is kept with all that is needed."""
    found = AdaptiveAttack(job.masking, settings).challenge(images, [row["label"] for row in rows])
    for row, challenged in zip(rows, found, strict=True):
        result.attacked.append(row["index"])
        if challenged.fooled:
            windows = [list(window.numbers) for window in challenged.attacked.windows]
            told = _told(row, "a certified image was fooled", row["label"], challenged.verdict.label)
            result.contradictions.append({**told, "patches": windows, "image": challenged.attacked.image.numpy()})


def _keep(image: Any, index: int, folder: Path) -> Path:
    """The attacked image itself, float32 [C, H, W] on the threat's grid."""
    path = folder / f"fooled-{index}.npy"
    with whole_file(path) as part, part.open("wb") as file:
        np.save(file, image)
    return path


def write_audit(result: Audit, run: Run, settings: AttackSettings, *, sample: int, attack: int) -> Path:
    """Keep what an audit found, with all that repeats it, beside the run's rows."""
    path = run.folder / "audit" / "audit.json"
    asked = {"sample": sample, "attack": attack, "settings": vars(settings)}
    content: Facts = {"run": str(run.folder), "key": run.key, **run.integrity, "job": run.job, "about": run.metadata}
    content |= {**asked, **result.to_json()}
    with whole_file(path) as part:
        part.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return path
