"""A plan to a finished run: find the model, find the images, go on where it stopped; or say what is missing."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from patchcleanser.attacks.base import AttackSettings
from patchcleanser.classifiers import Classifier, load_classifier
from patchcleanser.classifiers.load import pick_device
from patchcleanser.data import Dataset, chosen
from patchcleanser.engine import Precision
from patchcleanser.errors import ClassifierError, DataError, InputError, MissingDependencyError, RecordError
from patchcleanser.evaluation import AttackJob, Job
from patchcleanser.evaluation.class_names import match_labels
from patchcleanser.evaluation.timing import FILE as TIMES
from patchcleanser.evaluation.timing import Latencies, read_times, time_images
from patchcleanser.paper.base import MASKING, Plan
from patchcleanser.paper.images import DATA
from patchcleanser.paper.models import Model, model_of
from patchcleanser.records.run import Run

TIMED = 20
"""Images that are timed."""

Certify = Callable[[Job, Path, dict[str, Any]], Run]
Attack = Callable[[AttackJob, Path, dict[str, Any]], Run]
About = Callable[[str, str, str, Job], dict[str, Any]]


@dataclass(frozen=True)
class Hands:
    """Who does the work: certifies a job or attacks it, and says what a manifest says besides."""

    certify: Certify
    attack: Attack
    metadata: About


@dataclass(frozen=True)
class Missing:
    """A plan that cannot be run here, and why, in a sentence that says what to put where."""

    why: str


@dataclass(frozen=True)
class Laboratory:
    """Where and how plans are run. Classifiers and datasets are loaded once, whichever plans share them."""

    runs: Path
    hands: Hands
    root: Path | None = None
    limit: int | None = None
    seed: int = 0
    device: str = "auto"
    workers: str | None = None
    """The kind of device of those who do the work, if they are elsewhere."""
    precision: Precision = "exact"
    trust_code: bool = False
    """Whether the cards of models may name code, as in load_classifier."""
    _loaded: dict[str, Classifier] = field(default_factory=dict, repr=False)
    _images: dict[str, Dataset | DataError] = field(default_factory=dict, repr=False)

    @cached_property
    def kind(self) -> str:
        """The kind of device in use."""
        return self.workers or pick_device(self.device).type

    def folder(self, plan: Plan, images: int) -> Path:
        """Where a plan's rows lie; other images, devices and precisions have other rows."""
        return self.runs / f"{plan.slug}-{images}-{self.kind}-{self.precision}"

    def run(self, plan: Plan) -> Run | Latencies | Missing:
        """The finished run of a plan, or what is missing for it."""
        model = model_of(plan.model)
        try:
            classifier = self._classifier(model)
        except (ClassifierError, MissingDependencyError) as error:
            return Missing(f"{model.name} is not here ({error}); {model.missing}")
        try:
            images, _ = match_labels(self._dataset(plan.data), classifier)
        except DataError as error:
            return Missing(str(error))
        try:
            return self._carried_out(plan, model, classifier, images)
        except (DataError, ClassifierError, InputError, RecordError) as error:
            return Missing(f"{plan.slug} cannot be run: {error}")

    def _carried_out(self, plan: Plan, model: Model, classifier: Classifier, images: Dataset) -> Run | Latencies:
        asked = self._asked(plan)
        masks: dict[str, Any] = {"masks": (plan.masks, plan.masks), "precision": self.precision, "table": plan.table}
        job = Job(
            classifier,
            chosen(images, asked, seed=self.seed),
            plan.threat,
            plan.defense,
            **(masks if plan.defense == MASKING else {"options": dict(plan.options)}),
        )
        folder = self.folder(plan, len(job.dataset))
        metadata = {**self.hands.metadata(model.at(), plan.data, DATA[plan.data].split, job), "seed": self.seed}
        if plan.work == "time":
            return time_images(job, folder, metadata=metadata)
        if plan.work == "attack":
            settings = AttackSettings(iterations=plan.iterations, locations=plan.locations, seed=self.seed)
            return self.hands.attack(AttackJob(job, "apgd", settings), folder, metadata)
        return self.hands.certify(job, folder, metadata)

    def _asked(self, plan: Plan) -> int | None:
        """How many images: what was asked for, else as many as the paper took."""
        most = TIMED if plan.work == "time" else plan.images
        return min(filter(None, (self.limit, most)), default=None)

    def _classifier(self, model: Model) -> Classifier:
        if model.name not in self._loaded:
            self._loaded.clear()  # one at a time: they fill a GPU's memory
            self._loaded[model.name] = load_classifier(model.at(), device=self.device, trust_code=self.trust_code)
        return self._loaded[model.name]

    def _dataset(self, name: str) -> Dataset:
        """The images; if they are not there, it is looked for once."""
        if name not in self._images:
            try:
                self._images[name] = DATA[name].load(self.root)
            except DataError as error:
                self._images[name] = error
        found = self._images[name]
        if isinstance(found, DataError):
            raise found
        return found


@dataclass(frozen=True)
class Archive:
    """Runs that were made before, here or elsewhere: no model and no images are needed."""

    runs: Path
    root: Path | None = None

    def run(self, plan: Plan) -> Run | Latencies | Missing:
        """The finished run of a plan with the most images."""
        name = re.compile(re.escape(plan.slug) + r"-(\d+)-[a-z]+-(exact|fast)")
        folders = {path: name.fullmatch(path.name) for path in self.runs.glob(f"{plan.slug}-*")}
        sizes = {path: int(match[1]) for path, match in folders.items() if match}
        for folder in sorted(sizes, key=lambda path: -sizes[path]):
            try:
                found = read_times(folder / TIMES) if plan.work == "time" else Run.open(folder)
            except RecordError as error:  # the other plans' runs are none the worse for it
                return Missing(str(error))
            if isinstance(found, Latencies) or found.finished:
                return found
        return Missing(f"{self.runs} holds no finished run of {plan.slug}; run it without --stored")
