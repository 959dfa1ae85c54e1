"""Modules move; the fingerprints of stored runs and the specs of stored cards stay."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
import torch
import torchvision
from safetensors.torch import save_file

from patchcleanser import load_classifier
from patchcleanser.classifiers.fingerprints import MOVED
from patchcleanser.errors import TrainModeError

OWN = "python:patchcleanser.experiments.imagenet:resnet50"
FINGERPRINTS = {
    OWN: "4f57a592427f0cc3e7e5e58aa4981aee5b0bd2aff880dededf8e3e350b944ec8",
    f"{OWN}_at_32?classes=1000": "2f96169c5a3317e9a4acba3c952f32eeaaf9bf95037295dafbfb40bd2dcaa66d",
    f"inpaint:{OWN}": "dcc499c6f555446c14791e83b420e1dbca8c8527e48d8b76ed4e755bf7e80d4a",
    "mean:zoo:tiny,zoo:cifar10-resnet": "c9b01bb2bb10263ece421d789689b2b22dc8aceb262171a6d2a066ae4e4e21f2",
    "tokens:zoo:cifar10-vit": "faf789f00d007c4a41ce7bf0d90221c5beff0244040c3d983d1513999a71fdc9",
}
"""As they were before anything moved, of a ResNet-50 whose weights are all 0."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    state = {
        name: torch.zeros_like(tensor, dtype=torch.float16 if tensor.is_floating_point() else tensor.dtype)
        for name, tensor in torchvision.models.resnet50().state_dict().items()
    }
    facts = {"mean": "[0.5, 0.4, 0.3]", "std": "[0.2, 0.2, 0.2]"}
    save_file(state, folder / "resnet50_v1_imagenet.safetensors", facts)
    return folder


@pytest.mark.parametrize("spec", FINGERPRINTS)
def test_a_network_that_moved_is_the_same_model(spec: str, models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATCHCLEANSER_MODELS", str(models))
    assert load_classifier(spec, device="cpu").fingerprint == FINGERPRINTS[spec]


def test_what_moved_is_where_the_table_says() -> None:
    for today in MOVED.values():
        importlib.import_module(today)
    with pytest.raises(TrainModeError):  # so it was built
        load_classifier("python:patchcleanser.classifiers.networks:tiny?classes=7", device="cpu")
