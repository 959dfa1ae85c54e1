"""From a RunSpec to its finished run: executed here, or read from a folder of runs; else what is missing for it."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from patchcleanser.attacks.patch_attack import AttackSettings
from patchcleanser.classifiers import Classifier, load_classifier
from patchcleanser.classifiers.registry import pick_device
from patchcleanser.data import Dataset, chosen
from patchcleanser.engine import Precision
from patchcleanser.errors import ClassifierError, DataError, InputError, MissingDependencyError, RecordError
from patchcleanser.evaluation import AttackJob, Job
from patchcleanser.evaluation.class_names import match_labels
from patchcleanser.evaluation.timing import FILE as TIMES
from patchcleanser.evaluation.timing import Latencies, read_times, time_images
from patchcleanser.paper.experiments import MASKING, RunSpec
from patchcleanser.paper.models import PAPER_DATASETS, PaperModel, find_model
from patchcleanser.records.provenance import origin
from patchcleanser.records.run import Run

TIMED_IMAGES = 20


Execute = Callable[[Job | AttackJob, Path, dict[str, Any]], Run]
"""Runs a job into a folder with this metadata."""


@dataclass(frozen=True)
class Missing:
    """A run that is not available here, with a sentence that says what to put where."""

    reason: str


Outcome = Run | Latencies | Missing


@dataclass(frozen=True)
class LiveRunner:
    """Executes runs on this machine or its workers; a run that was begun is continued.

    The classifier of the last run and every dataset stay loaded for the runs that share them.
    """

    runs: Path
    execute: Execute
    root: Path | None = None
    limit: int | None = None
    seed: int = 0
    device: str = "auto"
    worker_device: str | None = None
    """Device type of remote workers, if they execute the runs."""
    precision: Precision = "exact"
    trust_code: bool = False
    """Whether the cards of models may name code, as in load_classifier."""
    _classifiers: dict[str, Classifier] = field(default_factory=dict, repr=False)
    _datasets: dict[str, Dataset | DataError] = field(default_factory=dict, repr=False)

    def run(self, spec: RunSpec) -> Outcome:
        model = find_model(spec.model)
        try:
            classifier = self._classifier(model)
        except (ClassifierError, MissingDependencyError) as error:
            return Missing(f"{model.name} is not here ({error}); {model.advice}")
        try:
            dataset, _ = match_labels(self._dataset(spec.data), classifier)
        except DataError as error:
            return Missing(str(error))
        try:
            return self._measure(spec, classifier, dataset)
        except (DataError, ClassifierError, InputError, RecordError) as error:
            return Missing(f"{spec.slug} cannot be run: {error}")

    def _measure(self, spec: RunSpec, classifier: Classifier, dataset: Dataset) -> Run | Latencies:
        masks: dict[str, Any] = {"masks": (spec.masks, spec.masks), "precision": self.precision, "table": spec.table}
        job = Job(
            classifier,
            chosen(dataset, self._images(spec), seed=self.seed),
            spec.threat,
            spec.defense,
            **(masks if spec.defense == MASKING else {"options": dict(spec.options)}),
        )
        # Other images, devices and precisions give other rows.
        device = self.worker_device or pick_device(self.device).type
        folder = self.runs / f"{spec.slug}-{len(job.dataset)}-{device}-{self.precision}"
        metadata = {**origin(), "seed": self.seed}
        if spec.kind == "time":
            return time_images(job, folder, metadata={**job.metadata, **metadata})
        if spec.kind == "attack":
            settings = AttackSettings(iterations=spec.iterations, locations=spec.locations, seed=self.seed)
            return self.execute(AttackJob(job, "apgd", settings), folder, metadata)
        return self.execute(job, folder, metadata)

    def _images(self, spec: RunSpec) -> int | None:
        """The number of images: at most the limit and the paper's number; None for all."""
        most = TIMED_IMAGES if spec.kind == "time" else spec.images
        return min(filter(None, (self.limit, most)), default=None)

    def _classifier(self, model: PaperModel) -> Classifier:
        if model.name not in self._classifiers:
            self._classifiers.clear()  # two may not fit into a GPU's memory
            classifier = load_classifier(model.fill(model.spec), device=self.device, trust_code=self.trust_code)
            self._classifiers[model.name] = classifier
        return self._classifiers[model.name]

    def _dataset(self, name: str) -> Dataset:
        """The dataset, searched for once even if it is missing."""
        if name not in self._datasets:
            try:
                self._datasets[name] = PAPER_DATASETS[name].load(self.root)
            except DataError as error:
                self._datasets[name] = error
        dataset = self._datasets[name]
        if isinstance(dataset, DataError):
            raise dataset
        return dataset


@dataclass(frozen=True)
class StoredRunner:
    """Reads runs that were finished before, here or elsewhere; needs no model and no images."""

    runs: Path
    root: Path | None = None

    def run(self, spec: RunSpec) -> Outcome:
        """The finished run with the most images."""
        name = re.compile(re.escape(spec.slug) + r"-(\d+)-[a-z]+-(exact|fast)")
        matches = {path: name.fullmatch(path.name) for path in self.runs.glob(f"{spec.slug}-*")}
        sizes = {path: int(match[1]) for path, match in matches.items() if match}
        for folder in sorted(sizes, key=lambda path: -sizes[path]):
            try:
                outcome = read_times(folder / TIMES) if spec.kind == "time" else Run.open(folder)
            except RecordError as error:  # other specs' runs are still good
                return Missing(str(error))
            if isinstance(outcome, Latencies) or outcome.finished:
                return outcome
        return Missing(f"{self.runs} holds no finished run of {spec.slug}; run it without --stored")
