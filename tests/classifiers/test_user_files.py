"""A user's own Python file is a classifier by its name or its path."""

import importlib
import shutil
import sys
from pathlib import Path

import pytest
import torch

from patchcleanser import (
    CallableClassifier,
    DoubleMasking,
    Threat,
    TorchClassifier,
    load_classifier,
)
from patchcleanser.errors import ClassifierError, InputError


@pytest.fixture
def user_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A user's own Python file in the working directory; its module name."""
    name = "my_models_for_the_adapter_test"
    (tmp_path / f"{name}.py").write_text(
        "import torch\n"
        "from torch import nn\n"
        "from patchcleanser import Preprocessing, TorchClassifier\n"
        "def network(classes=4):\n"
        "    torch.manual_seed(0)\n"
        "    return nn.Sequential(nn.Flatten(), nn.Linear(3 * 8 * 8, classes)).eval()\n"
        "def classifier():\n"
        "    return TorchClassifier(network(), Preprocessing(fill=(0.25,)))\n"
        "def brightness():\n"
        "    return lambda a: __import__('numpy').stack([a.mean((1, 2, 3)), 1 - a.mean((1, 2, 3))], 1)\n"
        "def nothing():\n"
        "    return None\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield name
    sys.modules.pop(name, None)


@pytest.mark.parametrize(
    ("function", "kind", "classes"),
    [
        ("network", TorchClassifier, 4),
        ("network?classes=7", TorchClassifier, 7),
        ("classifier", TorchClassifier, 4),
        ("brightness", CallableClassifier, 2),
    ],
)
def test_a_users_own_file_is_found_and_wrapped(user_file: str, function: str, kind: type, classes: int) -> None:
    classifier = load_classifier(f"python:{user_file}:{function}", device="cpu")
    assert isinstance(classifier, kind)
    with torch.inference_mode():
        assert classifier.checked_logits(torch.rand(3, 3, 8, 8)).shape == (3, classes)
    assert len(DoubleMasking(classifier, Threat.square(2), masks=2).predict(torch.rand(3, 3, 8, 8))) == 3


def test_a_users_file_may_be_named_by_its_path_and_is_the_same_model(user_file: str, tmp_path: Path) -> None:
    by_module = load_classifier(f"python:{user_file}:network", device="cpu").fingerprint
    for folder in ("", f"{tmp_path}/"):
        assert load_classifier(f"python:{folder}{user_file}.py:network", device="cpu").fingerprint == by_module


@pytest.mark.parametrize("changed", ["own_layers", "own_parents"])
def test_a_forward_that_is_written_in_another_file_is_another_model(
    user_file: str, tmp_path: Path, changed: str
) -> None:
    files = {
        "own_parents": "from torch import nn\nclass Parent(nn.Module):\n def forward(self, x): return self.two(x)",
        "own_layers": "from own_parents import Parent\nclass Layer(Parent):\n def two(self, x): return x[:, :2, 0, 0]",
        "own_models": "from own_layers import Layer\ndef make(): return Layer().eval()",
    }

    def fingerprint() -> str:
        for name, text in files.items():
            sys.modules.pop(name, None)
            (tmp_path / f"{name}.py").write_text(text)
        importlib.invalidate_caches()
        return load_classifier("python:own_models.py:make", device="cpu").fingerprint

    before = fingerprint()
    assert fingerprint() == before
    files[changed] = files[changed].replace("return ", "return -1.5 * ")
    assert fingerprint() != before
    for name in files:
        sys.modules.pop(name)


def test_of_two_files_of_one_name_the_second_is_refused_not_taken_for_the_first(user_file: str, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    copied = shutil.copy(f"{user_file}.py", tmp_path / "other")
    load_classifier(f"python:{user_file}.py:network", device="cpu")
    with pytest.raises(ClassifierError, match=f"another module is called {user_file}; rename the file"):
        load_classifier(f"python:{copied}:network", device="cpu")


@pytest.mark.parametrize(
    ("function", "error", "words"),
    [
        ("nothing", ClassifierError, "returned None"),
        ("absent", ClassifierError, "cannot import python:.*absent"),
        ("network?banana=1", InputError, "takes no option .banana.; it has classes, mean"),
    ],
)
def test_what_is_wrong_with_a_users_file_is_said(user_file: str, function: str, error: type, words: str) -> None:
    with pytest.raises(error, match=words):
        load_classifier(f"python:{user_file}:{function}", device="cpu")
