"""The ImageNet ResNet-50 that experiments start from."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torchvision
from safetensors.torch import save_file
from torch.nn import functional

from patchcleanser import load_classifier
from patchcleanser.errors import ClassifierError

SPEC = "python:patchcleanser.experiments.imagenet:resnet50"


def test_without_its_file_it_says_where_to_put_it(tmp_path: Path) -> None:
    with pytest.raises(
        ClassifierError, match=r"no resnet50_v1_imagenet\.safetensors in .*models; put it there, or name"
    ):
        load_classifier(SPEC, device="cpu")


def test_it_has_the_file_s_weights_normalisation_and_strides_and_a_head_for_other_classes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATCHCLEANSER_MODELS", str(tmp_path))
    state = {
        name: t.half() if t.is_floating_point() else t for name, t in torchvision.models.resnet50().state_dict().items()
    }
    mean, std = [0.5, 0.4, 0.3], [0.004] * 3
    save_file(state, tmp_path / "resnet50_v1_imagenet.safetensors", {"mean": json.dumps(mean), "std": json.dumps(std)})
    full = load_classifier(SPEC, device="cpu")
    assert (full.classes, full.names and full.names[1]) == (1000, "goldfish")
    assert full.preprocessing.mean == tuple(mean)
    assert full.module.layer2[0].conv1.stride == (2, 2)  # type: ignore[attr-defined]
    assert full.module.layer2[0].conv2.stride == (1, 1)  # type: ignore[attr-defined]
    part = load_classifier(f"{SPEC}?classes=7", device="cpu")
    assert part.logits(torch.zeros(1, 3, 64, 64)).shape == (1, 7)
    assert part.names is None
    assert full.preprocessing.crop == (224, 224)
    smaller = load_classifier(f"{SPEC}?classes=7&size=128", device="cpu").preprocessing
    assert (smaller.resize, smaller.crop) == (146, (128, 128))
    same = part.module.conv1.weight == state["conv1.weight"].float()  # type: ignore[attr-defined]
    assert same.all()
    torch.manual_seed(1)  # of the last layer
    inside = load_classifier(f"{SPEC}_at_32?classes=7&size=64", device="cpu")
    torch.manual_seed(1)
    outside = load_classifier(f"{SPEC}?classes=7&size=64", device="cpu")
    images = torch.rand(2, 3, 32, 32)
    larger = functional.interpolate(images, size=(64, 64), mode="bicubic")
    with torch.inference_mode():  # it is given images as CIFAR-10's networks see them, and sees them as its own
        logits = inside.logits(inside.prepare(images))
        assert torch.allclose(logits, outside.logits(outside.preprocessing.normalise(larger)), atol=1e-2)
    assert inside.preprocessing == load_classifier("zoo:tiny", device="cpu").preprocessing
