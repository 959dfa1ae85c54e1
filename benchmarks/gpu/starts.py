"""Start weights for training on Imagenette, as folders that `trained:` loads.

    PATCHCLEANSER_MODELS=packs/models python benchmarks/gpu/starts.py --lite4 efficientnet_lite4_imagenet.safetensors \
        --mobilenet mobilenet_v2-b0353104.pth --out packs/start --keep \
        --images 'parquet:packs/data/imagenette/imagenette-train-*.parquet'

Takes about a minute. Writes OUT/lite4 (1,000 classes), OUT/lite4-10 (or of other --classes) and OUT/mobilenet;
trained:OUT/mobilenet?classes=10 has a new last layer. With --keep it also writes OUT/lite4-kept and OUT/resnet50-kept:
their last layers are ImageNet's, cut to the classes of the images. ResNet-50 is read from PATCHCLEANSER_MODELS.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from patchcleanser import TorchClassifier, load_classifier
from patchcleanser.data import chosen, load_dataset
from patchcleanser.data.imagenet import imagenet_classes
from patchcleanser.data.multilabel_sets import load_multilabel
from patchcleanser.paper.models import RESNET50
from patchcleanser.training.artifacts import write_model

IMAGES, BATCH = 192, 32
NORM = 1.5
"""The norm of every filter; with filters as small as the published ones, a rate of 0.01 diverged."""
LITE4 = "timm:tf_efficientnet_lite4?size=224&mean=0.498,0.498,0.498&std=0.502,0.502,0.502"


def unfold(module: nn.Module, batches: list[Tensor]) -> None:
    """Put batch statistics back into a network whose batch norms are folded into its convolutions.

    A folded norm maps z to z + b. With the mean m and variance v of z, and filters s times as large, the norm of mean
    s*m, variance s*s*v, weight sqrt(s*s*v + eps) / s and bias b + m maps s*z to z + b as well: labels stay.
    """
    convolutions: list[nn.Conv2d] = []
    sums: dict[nn.BatchNorm2d, tuple[nn.Conv2d, list[Tensor]]] = {}

    def observe(layer: nn.Module, inputs: tuple[Tensor]) -> None:
        if isinstance(layer, nn.Conv2d):
            convolutions.append(layer)
        elif isinstance(layer, nn.BatchNorm2d):
            values = inputs[0].double()
            _, totals = sums.setdefault(layer, (convolutions[-1], []))
            totals.append(torch.stack([values.mean((0, 2, 3)), values.square().mean((0, 2, 3))]))

    hooks = [layer.register_forward_pre_hook(observe) for layer in module.modules()]
    with torch.no_grad():
        for batch in batches:
            module(batch)
        for hook in hooks:
            hook.remove()
        for norm, (convolution, totals) in sums.items():
            mean, square = torch.stack(totals).mean(0).float()
            variance = (square - mean.square()).clamp_min(0)
            scale = NORM / convolution.weight.flatten(1).norm(dim=1).clamp_min(1e-3)
            convolution.weight.mul_(scale[:, None, None, None])
            norm.weight.copy_((scale.square() * variance + norm.eps).sqrt() / scale)
            norm.bias.add_(mean)
            norm.running_mean.copy_(scale * mean)
            norm.running_var.copy_(scale.square() * variance)


def write(classifier: TorchClassifier, folder: Path, model: str, start: str, names: Sequence[str] = ()) -> None:
    preprocessing = asdict(classifier.preprocessing.uncropped)
    card = {"model": model, "preprocessing": preprocessing, "classes": list(names), "start": {"model": start}}
    write_model(classifier.module, folder, card)


def kept(layer: nn.Linear, names: Sequence[str]) -> nn.Linear:
    """The rows of ImageNet's last layer that belong to these classes."""
    rows = [imagenet_classes()[1].index(name) for name in names]
    smaller = nn.Linear(layer.in_features, len(rows))
    smaller.weight.data, smaller.bias.data = layer.weight.data[rows], layer.bias.data[rows]
    return smaller


def torch_classifier(spec: str) -> TorchClassifier:
    classifier = load_classifier(spec, device="cpu")
    if not isinstance(classifier, TorchClassifier):
        raise SystemExit(f"{spec} is no torch network")
    return classifier


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lite4", type=Path, required=True, help="the weights of make_efficientnet_lite4.py")
    parser.add_argument("--mobilenet", type=Path, help="torchvision's mobilenet_v2 weights")
    parser.add_argument("--multilabel", action="store_true", help="the images have lists of labels")
    parser.add_argument("--classes", type=int, default=10, help="of the last layer of the second Lite4")
    parser.add_argument("--keep", action="store_true", help="also write starts with ImageNet's rows for the classes")
    parser.add_argument("--images", required=True, help="training images for the statistics")
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    if given.mobilenet:
        spec = f"torchvision:mobilenet_v2?weights={given.mobilenet}"
        write(torch_classifier(spec), given.out / "mobilenet", "torchvision:mobilenet_v2", given.mobilenet.name)
    lite4 = torch_classifier(f"{LITE4}&weights={given.lite4}")
    images = chosen((load_multilabel if given.multilabel else load_dataset)(given.images), IMAGES)
    inputs = torch.cat([lite4.prepare(images.image(index)[None]) for index in range(len(images))]).split(BATCH)
    before = torch.cat([lite4.logits(batch).argmax(1) for batch in inputs])
    unfold(lite4.module, list(inputs))
    after = torch.cat([lite4.logits(batch).argmax(1) for batch in inputs])
    print(f"EfficientNet-Lite4: {int((before == after).sum())} of {len(images)} labels as before")
    write(lite4, given.out / "lite4", LITE4, given.lite4.name)
    layer: Any = lite4.module.classifier
    classes = given.classes
    if given.keep:
        names = images.classes
        lite4.module.classifier = kept(layer, names)
        write(lite4, given.out / "lite4-kept", f"{LITE4}&num_classes={len(names)}", given.lite4.name, names)
        resnet50: Any = torch_classifier(RESNET50)
        resnet50.module.fc = kept(resnet50.module.fc, names)
        write(resnet50, given.out / "resnet50-kept", f"{RESNET50}?classes={len(names)}", RESNET50, names)
    torch.manual_seed(0)
    lite4.module.classifier = nn.Linear(layer.in_features, classes)  # timm's own has too large weights
    write(lite4, given.out / f"lite4-{classes}", f"{LITE4}&num_classes={classes}", given.lite4.name)


if __name__ == "__main__":
    main()
