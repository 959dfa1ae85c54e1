"""Job and AttackJob: everything that decides the rows of a run."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from patchcleanser.attacks import ADAPTIVE, ATTACKS
from patchcleanser.attacks.patch_attack import AttackSettings, require_gradients
from patchcleanser.classifiers.classifier import Classifier
from patchcleanser.classifiers.registry import as_classifier
from patchcleanser.core.threats import Threat
from patchcleanser.data.dataset import Dataset
from patchcleanser.data.inputs import as_dataset
from patchcleanser.defenses import DEFENSES
from patchcleanser.defenses.defense import Defense
from patchcleanser.defenses.mask_defense import MaskDefense
from patchcleanser.engine import Confirm, Precision
from patchcleanser.errors import DataError, InputError, PatchCleanserError, ThreatError
from patchcleanser.records.provenance import versions

LABELS = 3
"""Version of the labels. Raise it when a change of the code may change a label: old and new rows then never mix."""

CHECKED_IMAGES = 20
"""How many unreadable or too small images `Job.check` passes over before it gives up looking for a usable one."""

SHARED = frozenset(("masks", "stride", "precision", "confirm"))
"""What all defenses with masks take, and a job says in fields of its own."""

Pair = int | tuple[int, int] | None


@dataclass(frozen=True)
class Job:
    """What to certify: images, classifier, threat, masks and defense. Jobs of equal identity have equal rows.

    `classifier` may also be a torch module, a function or a string for load_classifier; `dataset` a name for
    load_dataset, a torch dataset, a DataLoader or a list of (image, label); `threat` a text such as "2%".
    `table=True` computes and stores every two-mask label. Other defenses, smaller patches, vulnerability maps and
    thresholds can then be derived without the model.
    """

    classifier: Classifier
    dataset: Dataset
    threat: Threat
    defense: str = "double-masking"
    masks: Pair = None
    stride: Pair = None
    precision: Precision = "exact"
    table: bool = False
    confirm: Confirm = "sampled"
    """With fast labels: "all" recomputes every label of a certified image in float32, "sampled" a sample of labels."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Options of this defense only, such as threshold= of Minority Reports or seed= of challenger masking."""

    if TYPE_CHECKING:  # what it takes; the fields say what it holds

        def __init__(
            self,
            classifier: Classifier | nn.Module | Callable[..., Any] | str,
            dataset: Any,
            threat: Threat | str,
            defense: str = "double-masking",
            masks: Pair = None,
            stride: Pair = None,
            precision: Precision = "exact",
            table: bool = False,
            confirm: Confirm = "sampled",
            options: Mapping[str, Any] = ...,
        ) -> None: ...

    def __post_init__(self) -> None:
        object.__setattr__(self, "threat", Threat.of(self.threat))
        if not isinstance(self.defense, str) or self.defense not in DEFENSES:
            raise InputError.unknown("defense", self.defense, DEFENSES)
        if not isinstance(self.options, Mapping) or not all(isinstance(name, str) for name in self.options):
            raise InputError(f"options is a dict of the defense's own options, got {self.options!r}")
        if misplaced := self.options.keys() & SHARED:
            raise InputError(
                f"options are the defense's own, got {', '.join(sorted(misplaced))}; these are fields of Job"
            )
        object.__setattr__(self, "classifier", as_classifier(self.classifier))
        object.__setattr__(self, "dataset", as_dataset(self.dataset))
        self.labels  # noqa: B018  # raises if there are none
        if self.table and DEFENSES[self.defense].load().may_alert:
            raise InputError(f"{self.defense} looks at one mask at a time and has no table; leave out the table")
        if not self.has_masks and (self.table or self.masks or self.stride or self.precision != "exact"):
            raise InputError(f"{self.defense} has no masks; leave out --masks, --stride, --table and --precision")

    def __getstate__(self) -> dict[str, Any]:
        return init_fields(self)

    @property
    def labels(self) -> NDArray[np.int64]:
        """True labels, int64 [images]."""
        if self.dataset.labels is None:
            raise DataError(
                f"{self.dataset.name} has no labels, and nothing can be certified without true labels; "
                "use predict for unlabelled images"
            )
        return self.dataset.labels

    @property
    def device(self) -> torch.device:
        """Where the classifier is."""
        return self.classifier.device

    def truth(self, index: int) -> dict[str, Any]:
        """The columns of a row that say what is true of an image."""
        return {"label": int(self.labels[index])}

    @property
    def has_masks(self) -> bool:
        """Whether the defense works with a mask set."""
        return issubclass(DEFENSES[self.defense].load(), MaskDefense)

    @property
    def grid(self) -> str:
        """The masks or strides per axis, as 6x6."""
        return "x".join(map(str, self.identity["masks"] or self.identity["stride"]))

    @property
    def title(self) -> str:
        """Threat, masks and defense."""
        coarse = self.options.get("coarse")
        masks = f"{self.grid} masks{f' after {coarse}x{coarse}' if coarse else ''}, " if self.has_masks else ""
        return f"{self.threat}, {masks}{self.defense}"

    @property
    def masking(self) -> MaskDefense[Any, Any]:
        """The defense; InputError if it has no masks."""
        if not isinstance(self.built, MaskDefense):
            raise InputError(f"only defenses with masks can be attacked, and {self.defense} has none")
        return self.built

    @cached_property
    def built(self) -> Defense[Any, Any]:
        """The defense."""
        masks: dict[str, Any] = {}
        if self.has_masks:
            masks = {"masks": self.masks, "stride": self.stride, "precision": self.precision}
            masks |= {"confirm": self.confirm} if self.confirm != "sampled" else {}
        try:
            defense: Defense[Any, Any] = DEFENSES[self.defense].load()(
                self.classifier, self.threat, **masks, **self.options
            )
            return defense
        except TypeError as error:
            if "unexpected keyword" not in str(error):
                raise
            raise InputError(f"{self.defense} does not take {', '.join(self.options)}") from error

    def check(self, *, skip: bool = False) -> None:
        """Raise, before anything is written, if the masks cannot be built or the patch does not fit the images.

        With `skip`, images that do not fit are left out later, so one image that fits is enough.
        """
        problem: PatchCleanserError | None = None
        for index in range(min(CHECKED_IMAGES, len(self.dataset))):
            try:
                height, width = self.built.to_threat_grid(self.dataset.image(index)).shape[-2:]
                self.built.check_size((height, width))
                return
            except (DataError, ThreatError) as error:
                problem = problem or error
                if isinstance(error, ThreatError) and not skip:
                    if self.threat.grid == "source":  # another image may be larger
                        raise named_error(error, self.dataset.id(index)) from error
                    break
        if isinstance(problem, ThreatError):
            raise problem

    @property
    def metadata(self) -> dict[str, Any]:
        """What a manifest says besides the job itself; of model and data only what was loaded by name."""
        return {
            **({"model": self.classifier.spec} if self.classifier.spec else {}),
            **self.dataset.origin,
            "classes": list(self.dataset.classes) or list(self.classifier.names or ()),
            "model_classes": list(self.classifier.names or ()),
            **created(),
        }

    @cached_property
    def identity(self) -> dict[str, Any]:
        """Everything that decides the rows, as plain values."""
        local = self.built.receptive_field if isinstance(self.built, MaskDefense) else None
        return {
            "labels": LABELS,
            "classifier": self.classifier.fingerprint,
            "device": self.classifier.device.type,  # kernels of another kind of device round differently
            "precision": "fast" if self.built.fast else "exact",
            "data": self.dataset.fingerprint,
            "images": len(self.dataset),
            "threat": self.threat.to_json(),
            # 6 is the default of a defense with masks
            "masks": as_list(self.masks if self.masks or self.stride or not self.has_masks else 6),
            "stride": as_list(self.stride),
            "defense": self.defense,
            "options": dict(self.options),
            "table": self.table,
            **({"receptive_field": list(local)} if local else {}),
            **({"confirm": self.confirm} if self.confirm != "sampled" and self.built.fast else {}),
        }


@dataclass(frozen=True)
class AttackJob:
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

    def __getstate__(self) -> dict[str, Any]:
        return init_fields(self)

    @property
    def title(self) -> str:
        """Attack and threat."""
        return f"{self.attack}, {self.job.threat}"

    @cached_property
    def identity(self) -> dict[str, Any]:
        """Everything that decides the rows, as plain values."""
        budget = asdict(replace(self.settings, chunk=None))
        return {**self.job.identity, "kind": "attack", "attack": self.attack, "settings": budget, "table": False}


def created() -> dict[str, Any]:
    """When and by which versions a run is made."""
    return {"created": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), "versions": versions()}


def init_fields(instance: Any) -> dict[str, Any]:
    """The fields of a dataclass, without its cached properties: those may differ on the machine it is sent to."""
    return {entry.name: getattr(instance, entry.name) for entry in fields(instance)}


def named_error(error: PatchCleanserError, name: str) -> PatchCleanserError:
    """The same error with the image's name and what to do about it."""
    message = str(error) if name in str(error) else f"image {name}: {error}"
    smaller = "use a smaller patch, or " if isinstance(error, ThreatError) else ""
    return type(error)(f"{message}; {smaller}leave such images out with --unreadable skip")


def as_list(value: Pair) -> list[int] | None:
    """Both axes: 6 and (6, 6) are the same job."""
    if value is None:
        return None
    return list(value) if isinstance(value, tuple) else [value, value]
