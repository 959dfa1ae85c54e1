"""Recipes as readable data: what was done, so that it can be done again."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, Literal, get_args

from patchcleanser.errors import InputError
from patchcleanser.training.cutout import Ablation, Cutout, GreedyCutout

Optimizer = Literal["sgd", "adamw", "muon"]
Schedule = Literal["cosine", "onecycle", "step"]
Loss = Literal["label", "margin", "window", "interval"]
Numbers = Literal["no", "bf16"]


@dataclass(frozen=True)
class Recipe:
    """How to train. Sizes and rates are for one optimiser step of `batch` images in all."""

    epochs: int
    batch: int
    optimizer: Optimizer
    rate: float
    schedule: Schedule = "cosine"
    warmup: float = 0.0
    """Share of the steps over which the rate rises (onecycle: to its peak)."""
    step_epochs: int = 5
    """For the step schedule: the rate is divided by 10 every so many epochs."""
    weight_decay: float = 0.0
    label_smoothing: float = 0.0
    clip: float = 0.0
    """Largest gradient norm; 0 clips nothing."""
    ema: float = 0.0
    """Decay of the averaged weights, which are then the ones kept; 0 averages nothing."""
    shift: int = 0
    strength: float = 0.0
    """Augmentation: shifts in px, and the strength of shape and colour."""
    flip: bool = True
    """Whether images are mirrored at random; digits must not be."""
    cutout: Cutout = field(default_factory=lambda: Cutout(0))
    greedy_from: float = 0.0
    """A GreedyCutout is plain until this share of the epochs is over."""
    teacher_weight: float = 0.0
    """Share of the loss that follows a teacher's answer to the unmasked image."""
    temperature: float = 2.0
    guidance: float = 0.0
    """Weight of how far a network's feature maps are from a teacher's at the same place."""
    loss: Loss = "label"
    """What is made small: cross-entropy; BagCert's margin of votes; cross-entropy without the best window of local
    logits (PatchGuard); or the worst case of interval bounds."""
    margin: float = 0.3
    """For BagCert: by which share of all votes the true class should lead."""
    window: int = 9
    """For PatchGuard: the side of that window; 9 places see some of a 5×5 patch where the field is 5 px."""
    ramp: float = 0.5
    """The share of the steps over which plain cross-entropy gives way to windows or interval bounds."""
    precision: Numbers = "bf16"
    holdout: float = 0.02
    """Share of the training set kept out of training, by which the checkpoint is chosen."""

    def __post_init__(self) -> None:
        if self.epochs < 1 or self.batch < 1:
            raise InputError(f"epochs and batch are at least 1, got {self.epochs} and {self.batch}")
        for name, kind in (("optimizer", Optimizer), ("schedule", Schedule), ("loss", Loss), ("precision", Numbers)):
            if getattr(self, name) not in get_args(kind):
                raise InputError(f"{name} is one of {', '.join(get_args(kind))}, got {getattr(self, name)!r}")
        if not self.rate > 0:
            raise InputError(f"a learning rate is above 0, got {self.rate}")
        if self.window < 1 or not 0 <= self.ramp <= 1:
            raise InputError(f"a window is at least 1 and a ramp lies in [0, 1], got {self.window} and {self.ramp}")
        if self.guidance < 0:
            raise InputError(f"guidance is at least 0, got {self.guidance}")
        if self.guidance and self.loss not in ("label", "margin"):
            raise InputError(f"guidance does not go with the loss {self.loss!r}; set it to 0, got {self.guidance}")
        if not 0 <= self.holdout < 1:
            raise InputError(f"a holdout is a share in [0, 1), got {self.holdout}")

    def to_json(self) -> dict[str, Any]:
        """Plain values, with the kind of cutout named."""
        others = {"loss", "margin", "window", "ramp"} - _OWN.get(self.loss, set())
        others |= set() if self.guidance else {"guidance"}
        settings = {name: value for name, value in asdict(self).items() if name not in others}
        named = {"kind": type(self.cutout).__name__, **asdict(self.cutout)}
        return {**settings, "cutout": named}

    @property
    def fingerprint(self) -> str:
        """A hash of all settings."""
        return hashlib.sha256(json.dumps(self.to_json(), sort_keys=True).encode()).hexdigest()

    def changed(self, settings: dict[str, str]) -> Recipe:
        """With settings from the command line, as text: epochs=3, cutout.count=0."""
        own: dict[str, Any] = {}
        masks: dict[str, Any] = {}
        for name, text in settings.items():
            key = name.removeprefix("cutout.")
            target, values = (self, own) if key == name else (self.cutout, masks)
            kinds = {f.name: type(getattr(target, f.name)) for f in fields(target)}
            if key not in kinds or key == "cutout":
                owner = "a recipe" if target is self else "the cutout"
                raise InputError(f"{owner} has no setting {name!r}; it has {', '.join(kinds)}")
            try:
                values[key] = kinds[key](text) if kinds[key] is not bool else text.lower() in ("1", "true", "yes")
            except ValueError as error:
                raise InputError(f"{name} takes {_WORDS.get(kinds[key], 'text')}, got {text!r}") from error
        return replace(self, cutout=replace(self.cutout, **masks), **own)


_OWN = {"margin": {"loss", "margin"}, "window": {"loss", "window", "ramp"}, "interval": {"loss", "ramp"}}
"""The settings that mean something for this loss."""

_WORDS = {int: "a whole number", float: "a number"}

# Two 9-px masks hide a 5×5 patch anywhere on 32×32 (6×6 masks); training sees a little more.
_CIFAR_MASKS = GreedyCutout(count=2, smallest=7, largest=12, inside=True, tries=4, share=0.5)

# How a convolutional network learns at 32×32 from nothing.
_SCRATCH = Recipe(
    epochs=120,
    batch=512,
    optimizer="sgd",
    rate=0.4,
    schedule="onecycle",
    warmup=0.15,
    weight_decay=5e-4,
    clip=5.0,
    ema=0.998,
    shift=4,
)

# How one learns that sees tokens or single bands: by AdamW.
_GENTLE: dict[str, Any] = {
    "optimizer": "adamw",
    "rate": 1e-3,
    "schedule": "cosine",
    "warmup": 0.05,
    "weight_decay": 0.05,
    "clip": 1.0,
}

# How one learns whose answer is the mean of local ones.
_STEADY: dict[str, Any] = {"optimizer": "adamw", "rate": 2e-3, "weight_decay": 0.01}

# The networks of the baselines: nothing is held out, and the last averaged weights are kept.
_LOCAL = replace(_SCRATCH, epochs=100, holdout=0.0)

RECIPES: dict[str, Recipe] = {
    # Fine-tuning as in the paper; the rate is 0.001 for ViT and ResMLP (--set rate=0.001).
    "paper": Recipe(
        epochs=10,
        batch=64,
        optimizer="sgd",
        rate=0.01,
        schedule="step",
        step_epochs=5,
        cutout=Cutout(2),
        precision="no",
    ),
    "scratch-cifar": replace(_SCRATCH, label_smoothing=0.1, strength=0.4, cutout=_CIFAR_MASKS, greedy_from=0.6),
    "scratch-cifar-tokens": replace(
        _SCRATCH,
        **_GENTLE,
        label_smoothing=0.1,
        strength=0.4,
        cutout=replace(_CIFAR_MASKS, smallest=6, largest=11, tries=3),
        greedy_from=0.7,
    ),
    # The base classifier of de-randomized smoothing: it sees one band of 4 px and nothing else.
    "ds-cifar": replace(_LOCAL, epochs=150, cutout=Ablation(keep=4)),
    "smoothed-vit-cifar": replace(_LOCAL, **_GENTLE, epochs=200, cutout=Ablation(keep=4)),
    # A BagNet for Clipped BagNet, and one for PatchGuard and PatchGuard++, trained without its best window.
    "bagnet-cifar": _LOCAL,
    "patchguard-cifar": replace(_LOCAL, **_STEADY, loss="window"),
    # Votes stop answering to large steps: with SGD all of them fall silent.
    "bagcert-cifar": replace(_LOCAL, **_STEADY, epochs=150, loss="margin"),
    # Patches of 5 px at 6 random places a step; for 2 px: --set cutout.smallest=2 --set cutout.largest=2.
    "ibp-cifar": replace(
        _LOCAL,
        epochs=200,
        batch=256,
        optimizer="adamw",
        rate=1e-3,
        schedule="cosine",
        warmup=0.05,
        weight_decay=0.0,
        clip=1.0,
        ema=0.0,
        shift=2,
        cutout=Cutout(6, 5, 5, inside=True),
        loss="interval",
        precision="no",
    ),
}
