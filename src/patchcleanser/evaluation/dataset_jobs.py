"""RunJob and DatasetJob: what all jobs share, whichever kind of labels their images have."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from dataclasses import fields
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from patchcleanser.core.masks import PerAxis, per_axis
from patchcleanser.core.threats import Threat
from patchcleanser.data.dataset import Dataset
from patchcleanser.errors import ClassifierError, DataError, PatchCleanserError, ThreatError
from patchcleanser.records.metrics import Summary
from patchcleanser.records.provenance import versions

if TYPE_CHECKING:
    from patchcleanser.evaluation.workloads import BatchWorkload

CHECKED_IMAGES = 20
"""How many images `DatasetJob.check` passes over before it gives up looking for one that can be read and fits."""


class RunJob(ABC):
    """Everything that decides the rows of a run. Jobs of equal identity have equal rows. Subclasses are dataclasses."""

    def __getstate__(self) -> dict[str, Any]:
        return init_fields(self)

    @property
    @abstractmethod
    def base(self) -> DatasetJob:
        """The defense and its images: this job itself, or the one that is attacked."""

    @property
    @abstractmethod
    def title(self) -> str:
        """What is certified or attacked, for a progress bar."""

    @property
    @abstractmethod
    def identity(self) -> dict[str, Any]:
        """Everything that decides the rows, as plain values."""

    @abstractmethod
    def workload(self, *, skip: bool = False) -> BatchWorkload[Any, Any]:
        """The batches to certify or to attack; `skip` leaves out images that cannot be read."""


class DatasetJob(RunJob):
    """A defense, and the images of a dataset that it examines."""

    dataset: Dataset
    threat: Threat

    @property
    def base(self) -> DatasetJob:
        return self

    @property
    @abstractmethod
    def model(self) -> Any:
        """The classifier, or the detector."""

    @property
    @abstractmethod
    def built(self) -> Any:
        """The defense."""

    @abstractmethod
    def truth(self, index: int) -> dict[str, Any]:
        """The columns of a row that say what is true of an image."""

    @property
    def device(self) -> torch.device:
        """Where the classifier or the detector is."""
        device: torch.device = self.model.device
        return device

    @property
    def spec(self) -> str | None:
        """The string that loads the model, if there is one; it decides no row."""
        spec: str | None = self.model.spec
        return spec

    def check(self, *, skip: bool = False) -> None:
        """Raise, before anything is written, if the masks cannot be built or the patch does not fit the images.

        With `skip`, images that do not fit are left out later, so one image that fits is enough.
        """
        problem: PatchCleanserError | None = None
        for index in range(min(CHECKED_IMAGES, len(self.dataset))):
            try:
                self.check_image(self.dataset.image(index))
                return
            except (DataError, ThreatError) as error:
                problem = problem or error
                if isinstance(error, ThreatError) and not skip:
                    if self.threat.grid == "source":  # another image may be larger
                        raise named_error(error, self.dataset.id(index)) from error
                    break
        if isinstance(problem, ThreatError):
            raise problem

    def check_image(self, image: Tensor) -> None:
        """Raise if the masks cannot be built for an image, or the patch does not fit it."""
        height, width = self.built.to_threat_grid(image).shape[-2:]
        self.built.check_size((height, width))

    def check_unchanged(self) -> None:
        """Raise if the model is no longer the one of the identity: rows of two must never mix."""
        before, now = self.identity["classifier"], self.model.fingerprint
        if now != before:
            raise ClassifierError(
                f"the classifier changed since this job was made: its fingerprint was {before[:12]}…, and is "
                f"{now[:12]}… now; make a new job"
            )

    @property
    def sketch(self) -> str:
        """Changes in this process if the model's weights do."""
        sketch: str = self.model.sketch
        return sketch

    @property
    def metadata(self) -> dict[str, Any]:
        """What a manifest says besides the job itself; of model and data only what was loaded by name."""
        return {
            **({"model": self.spec} if self.spec else {}),
            **self.dataset.origin,
            "classes": list(self.dataset.classes),
            "created": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "versions": versions(),
        }

    def warn(self) -> None:
        """Warn of what looks wrong before any image is examined."""

    def judge(self, state: Summary) -> None:
        """Warn of results that say that the job itself is wrong."""


def init_fields(instance: Any) -> dict[str, Any]:
    """The fields of a dataclass, without its cached properties: those may differ on the machine it is sent to."""
    return {entry.name: getattr(instance, entry.name) for entry in fields(instance)}


def named_error(error: PatchCleanserError, name: str) -> PatchCleanserError:
    """The same error with the image's name and what to do about it."""
    message = str(error) if name in str(error) else f"image {name}: {error}"
    smaller = "use a smaller patch, or " if isinstance(error, ThreatError) else ""
    return type(error)(f"{message}; {smaller}leave such images out with --unreadable skip (in Python skip=True)")


def mask_identity(masks: PerAxis, stride: PerAxis, *, default: PerAxis = 6) -> dict[str, list[int] | None]:
    """Masks and stride for each axis, for an identity: 6 and (6, 6) are the same job."""
    counts = masks or (None if stride else default)
    return {
        name: None if value is None else list(per_axis(value, name))
        for name, value in (("masks", counts), ("stride", stride))
    }
