"""Preprocessing written into a spec: mean, std, resize, crop and interpolation."""

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from patchcleanser import Preprocessing, TorchClassifier, load_classifier, load_dataset
from patchcleanser.classifiers.registry import members, take_preprocessing
from patchcleanser.errors import InputError

CIFAR = "mean=0.4914,0.4822,0.4465&std=0.247,0.2435,0.2616&resize=32x32"


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """zoo:tiny as an ONNX file, which holds its network and not its preprocessing."""
    path = tmp_path_factory.mktemp("export") / "tiny.onnx"
    tiny = load_classifier("zoo:tiny", device="cpu")
    assert isinstance(tiny, TorchClassifier)
    shapes = ({0: torch.export.Dim("batch")},)
    torch.onnx.export(tiny.module, (torch.rand(2, 3, 32, 32),), path, dynamo=True, verbose=False, dynamic_shapes=shapes)
    return path


def test_an_exported_network_is_as_good_as_before_with_its_preprocessing_in_the_spec(exported: Path) -> None:
    sample = load_dataset("sample")
    images = torch.stack([torch.as_tensor(sample.image(index)) for index in range(40)])
    labels = {}
    with torch.inference_mode():
        for spec in ("zoo:tiny", f"onnx:{exported}?{CIFAR}", f"onnx:{exported}"):
            classifier = load_classifier(spec, device="cpu")
            labels[spec] = classifier.checked_logits(classifier.prepare(images)).argmax(dim=1)
    tiny, described, bare = labels.values()
    assert described.equal(tiny)
    assert not bare.equal(tiny)  # what happens without


def test_a_specs_options_are_its_preprocessing(exported: Path) -> None:
    options = "mean=0.49,0.48,0.45&std=0.25,0.24,0.26&resize=40&crop=32&interpolation=bilinear"
    wanted = Preprocessing(40, (32, 32), "bilinear", (0.49, 0.48, 0.45), (0.25, 0.24, 0.26))
    assert load_classifier(f"onnx:{exported}?{options}", device="cpu").preprocessing == wanted
    keywords = {"mean": [0.49, 0.48, 0.45], "std": (0.25, 0.24, 0.26), "resize": 40, "crop": 32}
    spec = f"onnx:{exported}?interpolation=bilinear"
    assert load_classifier(spec, device="cpu", **keywords).preprocessing == wanted


@pytest.mark.parametrize(
    ("spec", "option", "changed"),
    [
        ("timm:test_resnet?weights=none&size=32", "mean=0,0,0", {"mean": (0, 0, 0)}),
        ("torchvision:squeezenet1_1?weights=none", "interpolation=bicubic", {"interpolation": "bicubic"}),
        ("inpaint:net:tiny?", "resize=48x64", {"resize": (48, 64)}),
        ("zoo:tiny?", "resize=40&crop=32x24", {"resize": 40, "crop": (32, 24)}),
    ],
)
def test_they_replace_parts_of_a_preprocessing_that_is_known(spec: str, option: str, changed: dict[str, Any]) -> None:
    own, got = (load_classifier(text, device="cpu").preprocessing for text in (spec, f"{spec}&{option}"))
    assert got == replace(own, **changed) != own


def test_without_them_a_fingerprint_is_as_before_and_with_them_another(exported: Path) -> None:
    plain, normalised = (load_classifier(f"onnx:{exported}{query}", device="cpu") for query in ("", f"?{CIFAR}"))
    assert repr(plain.preprocessing) == repr(Preprocessing())
    assert plain.fingerprint != normalised.fingerprint
    assert load_classifier("zoo:tiny?resize=32x32", device="cpu").fingerprint == load_classifier("zoo:tiny").fingerprint


@pytest.fixture
def user_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A user's own models: a bare module, one that takes an option of that name, and a classifier."""
    name = f"own_options_{tmp_path.name}".replace("-", "_")
    (tmp_path / f"{name}.py").write_text(
        "from torch import nn\n"
        "from patchcleanser import Preprocessing, TorchClassifier\n"
        "def module(side=8):\n"
        "    return nn.Sequential(nn.Flatten(), nn.Linear(3 * side * side, 4)).eval()\n"
        "def cropped(crop=8):\n"
        "    return module(crop)\n"
        "def classifier():\n"
        "    return TorchClassifier(module(), Preprocessing((8, 8)))\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield name
    sys.modules.pop(name, None)


@pytest.mark.parametrize(
    ("function", "wanted"),
    [
        ("module?side=6&resize=6x6&mean=0,0,0&std=1,1,1", Preprocessing((6, 6), mean=(0, 0, 0), std=(1, 1, 1))),
        ("classifier?mean=0.5,0.5,0.5&std=1,1,1", Preprocessing((8, 8), mean=(0.5, 0.5, 0.5), std=(1, 1, 1))),
        ("cropped?crop=6&resize=6x6", Preprocessing((6, 6))),  # its own option keeps its meaning
    ],
)
def test_a_users_own_model_takes_them(user_file: str, function: str, wanted: Preprocessing) -> None:
    classifier = load_classifier(f"python:{user_file}:{function}", device="cpu")
    assert classifier.preprocessing == wanted
    with torch.inference_mode():
        assert classifier.checked_logits(classifier.prepare(torch.rand(1, 3, 20, 20))).shape == (1, 4)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("mean=grey", "mean is written as 0.49,0.48,0.45, got 'grey'"),
        ("std=0.2,,0.2", "std is written as 0.25,0.24,0.26, got '0.2,,0.2'"),
        ("mean=0.5,0.5,0.5&std=", "std is written as 0.25,0.24,0.26, got ''"),
        ("resize=large", r"resize is written as 256 \(the short side\) or 256x320, got 'large'"),
        ("crop=224x", "crop is written as 224 or 224x320, got '224x'"),
        ("crop=22.5", "crop is .* at least 1 px, got 22.5"),
        ("resize=32x32x3", "resize is a short side or"),
        ("interpolation=lanczos", "interpolation is nearest, bilinear or bicubic, got 'lanczos'"),
        ("resize=16&crop=24", "does not fit"),
    ],
)
def test_an_option_that_cannot_be_read_is_named(options: str, words: str) -> None:
    with pytest.raises(InputError, match=words):
        load_classifier(f"zoo:tiny?{options}", device="cpu")


def test_mean_without_std_is_refused_where_neither_is_known(exported: Path) -> None:
    with pytest.raises(InputError, match="mean and std come together"):
        load_classifier(f"onnx:{exported}?mean=0.5,0.5,0.5", device="cpu")


def test_commas_inside_options_do_not_split_an_ensemble() -> None:
    parts = [f"zoo:tiny?{CIFAR}", "net:tiny?mean=0.5,0.5,0.5"]
    assert members(f"mean:{','.join(parts)}") == parts
    both = load_classifier(f"mean:zoo:tiny?{CIFAR},zoo:tiny", device="cpu")
    assert both.preprocessing == load_classifier("zoo:tiny", device="cpu").preprocessing


def test_options_are_taken_out_once() -> None:
    options = {"weights": "none", "crop": 8, "mean": 0.5}
    assert take_preprocessing(options, own=("mean",)) == {"crop": 8}
    assert options == {"weights": "none", "mean": 0.5}
