"""MultiLabelJob: everything that decides the rows of images with several labels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch

from patchcleanser.attacks.patch_attack import AttackSettings
from patchcleanser.classifiers.classifier import Classifier
from patchcleanser.classifiers.registry import as_classifier
from patchcleanser.core.multilabel import Scores
from patchcleanser.core.threats import Threat
from patchcleanser.data.multilabel_sets import MultiLabelDataset
from patchcleanser.defenses.multilabel_masking import MultiLabelMasking, ScoreKind
from patchcleanser.errors import DataError, InputError, ThreatError
from patchcleanser.evaluation.jobs import CHECKED_IMAGES, Pair, as_list, created, init_fields, named_error

SCORES = 1
"""Version of the scores. Raise it when a change of the code may change one: old and new rows then never mix."""

CURVE: tuple[float, ...] = tuple(float(share) for share in np.round(1 / (1 + np.exp(-np.arange(-6, 6.01, 0.25))), 6))
"""The probabilities at which rows count answers, for curves of precision and recall: evenly spaced logits."""


@dataclass(frozen=True)
class MultiLabelJob:
    """What to certify: images with their classes, classifier, threat and masks. Jobs of equal identity have equal rows.

    `outputs` are the classifier's numbers of the dataset's classes, by default all of them in order. `threshold` is a
    probability for all classes or one for each; rows also count answers at those of `curve`, one for all classes.
    """

    classifier: Classifier
    dataset: MultiLabelDataset
    threat: Threat
    masks: Pair = None
    stride: Pair = None
    threshold: float | Sequence[float] | None = None
    scores: ScoreKind | None = None
    outputs: Sequence[int] | None = None
    curve: Sequence[float] = CURVE

    has_masks = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "threat", Threat.of(self.threat))
        object.__setattr__(self, "classifier", as_classifier(self.classifier))
        if not isinstance(self.dataset, MultiLabelDataset):
            raise InputError(f"images with several labels come from load_multilabel(…), got {self.dataset!r:.80}")
        if self.built.classes not in (0, len(self.dataset.classes)):
            raise DataError(
                f"{self.dataset.name} has {len(self.dataset.classes)} classes and {self.built.classes} outputs count; "
                "dataset.shared_with(classifier.names) gives the shared classes, and their outputs="
            )

    def __getstate__(self) -> dict[str, Any]:
        return init_fields(self)

    @classmethod
    def matched(
        cls, classifier: Classifier, dataset: MultiLabelDataset, threat: Threat, **options: Any
    ) -> MultiLabelJob:
        """A job on the classes that the classifier and the data share by name; by number if one has no names."""
        if not classifier.names or not dataset.classes:
            return cls(classifier, dataset, threat, **options)
        shared, outputs = dataset.shared_with(classifier.names)
        return cls(classifier, shared, threat, outputs=tuple(outputs.tolist()), **options)

    @property
    def device(self) -> torch.device:
        """Where the classifier is."""
        return self.classifier.device

    @property
    def title(self) -> str:
        """Threat and masks."""
        masks = "x".join(map(str, self.identity["masks"] or self.identity["stride"]))
        return f"{self.threat}, {masks} masks, several labels"

    @cached_property
    def built(self) -> MultiLabelMasking:
        """The defense."""
        return MultiLabelMasking(
            self.classifier,
            self.threat,
            threshold=self.threshold,
            scores=self.scores,
            classes=self.outputs,
            masks=self.masks,
            stride=self.stride,
        )

    @property
    def masking(self) -> MultiLabelMasking:
        """The defense, which has masks."""
        return self.built

    @property
    def labels(self) -> Any:
        """True classes, bool [images, classes]."""
        return self.dataset.targets

    @property
    def thresholds(self) -> Scores:
        """[thresholds, classes]: the job's own, and those of the curve."""
        curve = self.built.on_scores(np.asarray(self.curve, dtype=np.float64))[:, None]
        classes = len(self.dataset.classes)
        own = np.broadcast_to(self.built.score_thresholds, (1, classes))
        return np.concatenate([own, np.broadcast_to(curve, (len(curve), classes))])

    def truth(self, index: int) -> dict[str, Any]:
        """The columns of a row that say what is true of an image."""
        return {"classes": np.flatnonzero(self.dataset.targets[index]).tolist()}

    def check(self, *, skip: bool = False) -> None:
        """Raise, before anything is written, if the masks cannot be built or the patch does not fit the images.

        With `skip`, images that do not fit are left out later, so one image that fits is enough.
        """
        for index in range(min(CHECKED_IMAGES, len(self.dataset))):
            try:
                height, width = self.built.to_threat_grid(self.dataset.image(index)).shape[-2:]
                self.built.check_size((height, width))
                return
            except (DataError, ThreatError) as error:
                if not skip:
                    raise named_error(error, self.dataset.id(index)) from error

    @property
    def metadata(self) -> dict[str, Any]:
        """What a manifest says besides the job itself."""
        model = {"model": self.classifier.spec} if self.classifier.spec else {}
        return {**model, **self.dataset.origin, "classes": list(self.dataset.classes), **created()}

    @cached_property
    def identity(self) -> dict[str, Any]:
        """Everything that decides the rows, as plain values."""
        return {
            "kind": "multilabel",
            "scores": SCORES,
            "classifier": self.classifier.fingerprint,
            "device": self.device.type,
            "precision": "exact",
            "data": self.dataset.fingerprint,
            "images": len(self.dataset),
            "outputs": None if self.outputs is None else list(self.outputs),
            "threat": self.threat.to_json(),
            "masks": as_list(self.masks or (None if self.stride else 6)),
            "stride": as_list(self.stride),
            "defense": "multilabel-masking",
            "options": {
                "scores": self.built.scores,
                "threshold": [float(share) for share in self.built.threshold],
                "curve": list(self.curve),
            },
        }


@dataclass(frozen=True)
class MultiLabelAttackJob:
    """Classes of certified images to attack, and with which budget. Jobs of equal identity have equal rows."""

    job: MultiLabelJob
    settings: AttackSettings = field(default_factory=AttackSettings)

    def __post_init__(self) -> None:
        plain = AttackSettings()
        unused = [name for name in ("places", "loss", "target") if getattr(self.settings, name) != getattr(plain, name)]
        if unused:
            raise InputError(
                f"the attack on classes chooses its places, loss and target itself; leave out {', '.join(unused)}"
            )

    def __getstate__(self) -> dict[str, Any]:
        return init_fields(self)

    @property
    def title(self) -> str:
        """Attack and threat."""
        return f"classes under attack, {self.job.threat}"

    @cached_property
    def identity(self) -> dict[str, Any]:
        """Everything that decides the rows, as plain values."""
        budget = asdict(replace(self.settings, chunk=None))
        return {**self.job.identity, "kind": "multilabel-attack", "attack": "adaptive", "settings": budget}
