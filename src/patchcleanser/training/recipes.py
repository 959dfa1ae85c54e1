"""Settings of training and hardening, as readable data."""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, Literal, get_args

from patchcleanser.errors import InputError, did_you_mean
from patchcleanser.training.cutout import Ablation, Cutout, GreedyCutout

Optimizer = Literal["sgd", "adamw", "muon"]
Schedule = Literal["cosine", "onecycle", "step"]
Loss = Literal["label", "margin", "window", "interval", "visible", "binary"]
Autocast = Literal["no", "bf16"]


@dataclass(frozen=True)
class Recipe:
    """How to train on labelled images. A step takes `batch` images over all processes."""

    epochs: int
    batch: int
    optimizer: Optimizer
    rate: float
    schedule: Schedule = "cosine"
    warmup: float = 0.0
    """Share of the steps in which the rate rises (onecycle: to its peak)."""
    step_epochs: int = 5
    """The step schedule divides the rate by 10 every so many epochs."""
    weight_decay: float = 0.0
    label_smoothing: float = 0.0
    clip: float = 0.0
    """Largest gradient norm; 0 does not clip."""
    ema: float = 0.0
    """Decay of the averaged weights, which are evaluated and returned; 0 does not average."""
    shift: int = 0
    """Augmentation: largest shift in px."""
    strength: float = 0.0
    """Augmentation: strength of changes of shape and colour."""
    flip: bool = True
    """Augmentation: random flips left to right; not for digits."""
    cutout: Cutout = field(default_factory=lambda: Cutout(0))
    greedy_from: float = 0.0
    """A GreedyCutout has random masks only in this first share of the epochs."""
    teacher_weight: float = 0.0
    """Weight of the distillation loss (a teacher's logits for the unmasked image); labels have the rest."""
    temperature: float = 2.0
    guidance: float = 0.0
    """Weight of feature distillation: the distance of feature maps from a teacher's."""
    loss: Loss = "label"
    """Cross-entropy of labels; BagCert's margin of votes; cross-entropy without the best window of local logits
    (PatchGuard); of interval bounds; of the local logits that the worst pair of masks leaves visible (one pass); or
    binary, of each class by itself (several labels an image)."""
    margin: float = 0.3
    """BagCert: the share of all votes by which the true class should lead."""
    window: int = 9
    """PatchGuard: side of the window, in local logits; a 5×5 patch reaches 9 of them where the field is 5 px."""
    ramp: float = 0.5
    """Share of the steps in which plain cross-entropy gives way to windows, interval bounds or masks."""
    worst: float = 0.5
    """One pass: the share of the images that are trained under their worst pair of masks."""
    pairs: int = 3
    """One pass with a head: the random pairs of masks of which the worst counts; without a head it is that of all."""
    frozen_norms: bool = False
    """Batch norms keep the statistics of the start weights, as in evaluation; masked batches have others."""
    precision: Autocast = "bf16"
    holdout: float = 0.02
    """Share of the training set that is held out to select the weights."""

    def __post_init__(self) -> None:
        if self.epochs < 1 or self.batch < 1:
            raise InputError(f"epochs and batch are at least 1, got {self.epochs} and {self.batch}")
        for name, kind in (("optimizer", Optimizer), ("schedule", Schedule), ("loss", Loss), ("precision", Autocast)):
            if getattr(self, name) not in get_args(kind):
                raise InputError(f"{name} is one of {', '.join(get_args(kind))}, got {getattr(self, name)!r}")
        if not self.rate > 0:
            raise InputError(f"a learning rate is above 0, got {self.rate}")
        if self.window < 1 or not 0 <= self.ramp <= 1:
            raise InputError(f"a window is at least 1 and a ramp lies in [0, 1], got {self.window} and {self.ramp}")
        if not 0 <= self.worst <= 1 or self.pairs < 1:
            raise InputError(f"worst is a share in [0, 1] and pairs at least 1, got {self.worst} and {self.pairs}")
        if self.guidance < 0:
            raise InputError(f"guidance is at least 0, got {self.guidance}")
        if self.guidance and self.loss not in ("label", "margin"):
            raise InputError(
                f"feature distillation does not work with the loss {self.loss!r}; "
                f"set guidance to 0, got {self.guidance}"
            )
        if self.loss == "binary" and (self.teacher_weight or self.label_smoothing):
            raise InputError(
                "the loss 'binary' takes no teacher and no label smoothing; set teacher_weight and label_smoothing to "
                f"0, got {self.teacher_weight} and {self.label_smoothing}"
            )
        if not 0 <= self.holdout < 1:
            raise InputError(f"a holdout is a share in [0, 1), got {self.holdout}")

    def to_dict(self) -> dict[str, Any]:
        """Plain values, with the kind of cutout, and without settings that this loss does not use."""
        unused = {"loss", "margin", "window", "ramp", "worst", "pairs"} - _LOSS_SETTINGS.get(self.loss, set())
        unused |= {name for name in ("guidance", "frozen_norms") if not getattr(self, name)}
        settings = {name: value for name, value in asdict(self).items() if name not in unused}
        return {**settings, "cutout": {"kind": type(self.cutout).__name__, **asdict(self.cutout)}}

    @property
    def fingerprint(self) -> str:
        """A hash of all settings."""
        return hashlib.sha256(json.dumps(self.to_dict(), sort_keys=True).encode()).hexdigest()

    def changed(self, settings: dict[str, str]) -> Recipe:
        """The recipe with settings from the command line, given as text: epochs=3, cutout.count=0."""
        recipe_values: dict[str, Any] = {}
        cutout_values: dict[str, Any] = {}
        for name, text in settings.items():
            key = name.removeprefix("cutout.")
            target, values = (self, recipe_values) if key == name else (self.cutout, cutout_values)
            types = {f.name: type(getattr(target, f.name)) for f in fields(target)}
            if key not in types or key == "cutout":
                owner = "a recipe" if target is self else "the cutout"
                raise InputError(
                    f"{owner} has no setting {name!r}; it has {', '.join(types)}{did_you_mean(key, types)}"
                )
            try:
                values[key] = types[key](text) if types[key] is not bool else text.lower() in ("1", "true", "yes")
            except ValueError as error:
                expected = "a whole number" if types[key] is int else "a number"
                raise InputError(f"{name} takes {expected}, got {text!r}") from error
        return replace(self, cutout=replace(self.cutout, **cutout_values), **recipe_values)


_LOSS_SETTINGS = {
    "margin": {"loss", "margin"},
    "window": {"loss", "window", "ramp"},
    "interval": {"loss", "ramp"},
    "visible": {"loss", "ramp", "worst", "pairs"},
    "binary": {"loss"},
}
"""The settings that each loss uses."""


@dataclass(frozen=True)
class HardenSettings:
    """How to harden.

    For a threat on the input grid the copy is trained with the defense's own masks, two at a time. On the source grid
    masks fall elsewhere in each image, so random squares 0.75 to 1.5 times as long are used.
    """

    epochs: int = 60
    batch: int = 64
    rate: float = 5e-5
    weight_decay: float = 0.01
    unmasked: float = 0.3
    """Share of each batch that stays unmasked, to preserve labels of unmasked images."""
    tries: int = 2
    """Masks tried for each mask; the one that changes the logits most is used."""
    greedy: float = 0.5
    """Share of the steps with such worst masks; the rest have random ones."""
    holdout: float = 0.1
    every: int = 2
    """Epochs between checks on held-out photos."""
    patience: int = 8
    """Checks without improvement before stopping."""
    masks: int = 6
    smallest_crop: float = 0.4
    """Photos are cropped at random to at least this share of their area."""
    colour: float = 0.4
    """Brightness, contrast and saturation change by up to half of this."""
    mix: float = 0.5
    """The largest share of another photo that is blended into one; half of the photos stay unblended."""
    sharp: int = 1
    """Among smaller photos, those at least half as wide and high as the input are used so often an epoch."""
    features: float = 0.0
    """Weight of the distance of the last layer's inputs from the original's; above 0 that layer is frozen."""
    mirror: bool = False
    """Whether the original's logits are averaged over an image and its mirror image."""
    frozen: tuple[str, ...] = ()
    """Layers that are not trained, by how the names of their weights begin."""
    average: float = 0.998
    """Decay of the averaged weights, which are checked and returned; 0 does not average."""

    def __post_init__(self) -> None:
        for name in ("epochs", "batch", "tries", "every", "patience", "masks", "sharp"):
            if getattr(self, name) < 1:
                raise InputError(f"{name} is at least 1, got {getattr(self, name)}")
        if isinstance(self.frozen, str):
            raise InputError(f"frozen is a tuple of names of layers, got {self.frozen!r}; write ({self.frozen!r},)")
        if not self.rate > 0:
            raise InputError(f"rate is above 0, got {self.rate}")
        if not 0 <= self.features < math.inf:
            raise InputError(f"features is a weight of at least 0, got {self.features}")
        for name in ("unmasked", "average"):
            if not 0 <= getattr(self, name) < 1:
                raise InputError(f"{name} is at least 0 and below 1, got {getattr(self, name)}")
        for name, most in (("mix", 1), ("greedy", 1), ("colour", 2)):
            if not 0 <= getattr(self, name) <= most:
                raise InputError(f"{name} is a number from 0 to {most}, got {getattr(self, name)}")


# Two 9-px masks hide a 5×5 patch anywhere on 32×32 (6×6 masks); training sees a little more.
_CIFAR_MASKS = GreedyCutout(count=2, smallest=7, largest=12, inside=True, tries=4, share=0.5)

# Convolutional networks at 32×32, from scratch.
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

# Networks of tokens.
_ADAMW: dict[str, Any] = {
    "optimizer": "adamw",
    "rate": 1e-3,
    "schedule": "cosine",
    "warmup": 0.05,
    "weight_decay": 0.05,
    "clip": 1.0,
}

# Networks whose logits are means of local ones.
_LOCAL_ADAMW: dict[str, Any] = {"optimizer": "adamw", "rate": 2e-3, "weight_decay": 0.01}

# Networks of the baselines: nothing is held out, and the last averaged weights are returned.
_BASELINE = replace(_SCRATCH, epochs=100, holdout=0.0)

RECIPES: dict[str, Recipe] = {
    # Fine-tuning as in the paper; the rate is 0.001 for ViT and ResMLP (--set rate=0.001).
    "paper": Recipe(epochs=10, batch=64, optimizer="sgd", rate=0.01, schedule="step", cutout=Cutout(2), precision="no"),
    "scratch-cifar": replace(_SCRATCH, label_smoothing=0.1, strength=0.4, cutout=_CIFAR_MASKS, greedy_from=0.6),
    "scratch-cifar-tokens": replace(
        _SCRATCH,
        **_ADAMW,
        label_smoothing=0.1,
        strength=0.4,
        cutout=replace(_CIFAR_MASKS, smallest=6, largest=11, tries=3),
        greedy_from=0.7,
    ),
    # The base classifier of de-randomized smoothing sees one band of 4 px.
    "ds-cifar": replace(_BASELINE, epochs=150, cutout=Ablation(keep=4)),
    "smoothed-vit-cifar": replace(_BASELINE, **_ADAMW, epochs=200, cutout=Ablation(keep=4)),
    # BagNets: for Clipped BagNet, and for PatchGuard and PatchGuard++, trained without its best window.
    "bagnet-cifar": _BASELINE,
    "patchguard-cifar": replace(_BASELINE, **_LOCAL_ADAMW, loss="window"),
    # With SGD's large steps all votes become 0 and get no gradient.
    "bagcert-cifar": replace(_BASELINE, **_LOCAL_ADAMW, epochs=150, loss="margin"),
    # Masks hide local logits, not pixels, so that one pass gives the loss under every pair of masks of --patch.
    "one-pass-cifar": replace(_SCRATCH, label_smoothing=0.1, strength=0.2, loss="visible", ramp=0.3),
    # Patches of 5 px at 6 random places an image; for 2 px: --set cutout.smallest=2 --set cutout.largest=2.
    "ibp-cifar": replace(
        _BASELINE,
        **{**_ADAMW, "weight_decay": 0.0},
        epochs=200,
        batch=256,
        ema=0.0,
        shift=2,
        cutout=Cutout(6, 5, 5, inside=True),
        loss="interval",
        precision="no",
    ),
    # Several labels an image, from ImageNet's weights. Masks are a quarter to half of the side, as those for 1% to 8%.
    "multilabel": Recipe(
        epochs=20,
        batch=64,
        **{**_ADAMW, "rate": 2e-4},
        ema=0.998,
        shift=16,
        strength=0.3,
        cutout=GreedyCutout(count=2, smallest=0.25, largest=0.5, inside=True, tries=3, share=0.5),
        greedy_from=0.5,
        loss="binary",
        holdout=0.1,
    ),
}
