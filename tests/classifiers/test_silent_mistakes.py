"""Mistakes that would only show as low accuracy: wrong normalisation, and labels that do not exclude each other."""

import logging
import re
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import timm
import torch
from torch import nn
from torchvision import models

from patchcleanser import CallableClassifier, DoubleMasking, Preprocessing, Threat, TorchClassifier, load_classifier
from patchcleanser.classifiers.onnx import OnnxClassifier
from patchcleanser.classifiers.timm import timm_preprocessing
from patchcleanser.classifiers.transformers import TransformersClassifier
from patchcleanser.classifiers.wrappers import mirrored
from patchcleanser.defenses.multilabel_masking import MultiLabelMasking
from patchcleanser.errors import ClassifierError

LINEAR = (nn.Flatten(), nn.Linear(3 * 8 * 8, 4))


@pytest.fixture
def warnings(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.WARNING, logger="patchcleanser")
    return caplog


@pytest.mark.parametrize(
    ("mean", "std"), [((123.7, 116.3, 103.5), (58.4, 57.1, 57.4)), ((0.5, 0.5, 0.5), (127.5, 127.5, 127.5))]
)
def test_constants_of_8_bit_pixels_are_warned_about(
    mean: tuple[float, ...], std: tuple[float, ...], warnings: pytest.LogCaptureFixture
) -> None:
    Preprocessing(mean=mean, std=std)
    (record,) = warnings.records
    assert (record.name, record.levelno) == ("patchcleanser", logging.WARNING)
    assert "look like those of pixels from 0 to 255, but pixels lie in [0, 1]: divide by 255" in warnings.text


def test_usual_constants_are_not(warnings: pytest.LogCaptureFixture) -> None:
    Preprocessing(mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225))
    Preprocessing(mean=(0, 0, 0), std=(1, 1, 1))
    Preprocessing(mean=(0.5,), std=(1 / 255,))
    assert warnings.text == ""


@pytest.mark.parametrize("library", ["timm", "torchvision"])
def test_a_bare_network_of_a_library_is_warned_about_with_the_fix(
    library: str, warnings: pytest.LogCaptureFixture
) -> None:
    module = timm.create_model("test_resnet") if library == "timm" else models.squeezenet1_1(weights=None)
    TorchClassifier(module.eval())
    assert "was given without preprocessing" in warnings.text
    assert f"load it as {library}:NAME, or pass" in warnings.text


def test_the_fix_in_the_warning_works_after_one_import(warnings: pytest.LogCaptureFixture) -> None:
    TorchClassifier(timm.create_model("test_resnet").eval())
    fix = re.search(r"or pass (.*?\))", warnings.text)
    assert fix is not None
    code = f"import patchcleanser, timm; module = timm.create_model('test_resnet'); print({fix[1]})"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.startswith("Preprocessing(")


def test_a_network_whose_preprocessing_is_chosen_is_not(warnings: pytest.LogCaptureFixture) -> None:
    module = timm.create_model("test_resnet").eval()
    for preprocessing in (Preprocessing(), timm_preprocessing(module)):
        TorchClassifier(module, preprocessing)
    TorchClassifier(nn.Sequential(nn.BatchNorm2d(3), module).eval())
    TorchClassifier(nn.Sequential(*LINEAR).eval())
    load_classifier("torchvision:squeezenet1_1?weights=none", device="cpu")
    assert warnings.text == ""


def test_a_bare_network_of_a_users_function_is_warned_about_unless_the_spec_has_its_preprocessing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, warnings: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "bare_network.py").write_text(
        "import timm\ndef make():\n    return timm.create_model('test_vit').eval()\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    load_classifier("python:bare_network:make?mean=0.5,0.5,0.5&std=0.5,0.5,0.5", device="cpu")
    assert warnings.text == ""
    load_classifier("python:bare_network:make", device="cpu")
    assert "VisionTransformer was given without preprocessing" in warnings.text


def test_an_onnx_file_without_normalisation_is_warned_about(tmp_path: Path, warnings: pytest.LogCaptureFixture) -> None:
    path = exported(tmp_path, dynamo=False, last=nn.Identity())
    load_classifier(f"onnx:{path}?mean=0.5,0.5,0.5&std=0.2,0.2,0.2", device="cpu")
    assert warnings.text == ""
    load_classifier(f"onnx:{path}", device="cpu")
    assert "so it sees pixels from 0 to 1" in warnings.text


class Gated(nn.Module):
    """Uses a sigmoid on the way, but not for its output."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.head = nn.Sigmoid(), nn.Sequential(*LINEAR)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(x * self.gate(x))


class Tagger(nn.Module):
    """Scores tags."""

    def __init__(self) -> None:
        super().__init__()
        self.features, self.tags = LINEAR[0], nn.Sequential(LINEAR[1], nn.Sigmoid())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.tags(self.features(x))


@pytest.mark.parametrize("module", [nn.Sequential(*LINEAR, nn.Sigmoid()), Tagger()])
def test_a_module_that_ends_in_a_sigmoid_is_refused_with_the_ways_on(module: nn.Module) -> None:
    classifier = TorchClassifier(module.eval())
    with pytest.raises(ClassifierError, match=r"ends in nn.Sigmoid, .*use MultiLabelMasking .*take the sigmoid out"):
        DoubleMasking(classifier, Threat.square(2), masks=2)
    with pytest.raises(ClassifierError, match=r"ends in nn.Sigmoid"):
        DoubleMasking(mirrored(classifier), Threat.square(2), masks=2)
    assert MultiLabelMasking(classifier, Threat.square(2), masks=2).scores == "probabilities"
    wrapped = CallableClassifier(module.eval(), array="torch")
    assert len(DoubleMasking(wrapped, Threat.square(2), masks=2).predict(torch.rand(1, 3, 8, 8))) == 1


@pytest.mark.parametrize(
    "module", [nn.Sequential(*LINEAR), nn.Sequential(*LINEAR, nn.Softmax(1)), Gated(), nn.Flatten()]
)
def test_modules_of_labels_that_exclude_each_other_are_taken(module: nn.Module) -> None:
    TorchClassifier(module.eval()).require_one_label("this certifies")


class Scored(nn.Module):
    """Ends in a function, not in a layer."""

    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.head, self.function = nn.Sequential(*LINEAR), function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(self.head(x))


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (torch.sigmoid, "do not sum to 1, as after torch.sigmoid: if several labels may be right"),
        (partial(torch.softmax, dim=1), "sum to 1, as after a softmax: labels are the same"),
    ],
)
def test_a_sigmoid_or_softmax_inside_forward_is_noticed_once_by_its_scores(
    function: Callable[[torch.Tensor], torch.Tensor], words: str, warnings: pytest.LogCaptureFixture
) -> None:
    warnings.set_level(logging.INFO, logger="patchcleanser")
    defense = DoubleMasking(TorchClassifier(Scored(function).eval()), Threat.square(2), masks=3)
    for _ in range(2):
        defense.predict(torch.rand(1, 3, 8, 8))
    assert [record.levelno for record in warnings.records] == [logging.WARNING]
    assert words in warnings.text


def test_logits_and_the_probabilities_of_a_function_are_not_warned_about(warnings: pytest.LogCaptureFixture) -> None:
    warnings.set_level(logging.INFO, logger="patchcleanser")
    soft = CallableClassifier(Scored(partial(torch.softmax, dim=1)).eval(), array="torch", outputs="probabilities")
    for classifier in (soft, TorchClassifier(nn.Sequential(*LINEAR).eval())):
        DoubleMasking(classifier, Threat.square(2), masks=3).predict(torch.rand(1, 3, 8, 8))
    assert warnings.text == ""


def test_a_transformers_model_of_several_labels_is_refused() -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 8}
    config = transformers.ViTConfig(image_size=8, patch_size=4, num_labels=3, **sizes)
    model = transformers.ViTForImageClassification(config).eval()
    assert TransformersClassifier(model).classes == 3
    config.problem_type = "multi_label_classification"
    with pytest.raises(
        ClassifierError, match=r"problem_type multi_label_classification, .*single_label_classification"
    ):
        TransformersClassifier(model).require_one_label("this certifies")
    assert MultiLabelMasking(TransformersClassifier(model), Threat.square(2), masks=2).scores == "logits"


def exported(folder: Path, *, dynamo: bool, last: nn.Module) -> Path:
    module, path = nn.Sequential(*LINEAR, last).eval(), folder / "model.onnx"
    torch.onnx.export(module, (torch.rand(1, 3, 8, 8),), path, dynamo=dynamo, verbose=False)
    return path


@pytest.mark.parametrize("dynamo", [True, False])
def test_an_onnx_graph_whose_output_comes_from_a_sigmoid_is_refused(dynamo: bool, tmp_path: Path) -> None:
    path = exported(tmp_path, dynamo=dynamo, last=nn.Sigmoid())
    with pytest.raises(ClassifierError, match=r"model.onnx comes from a Sigmoid, .*take the sigmoid out"):
        load_classifier(f"onnx:{path}", device="cpu").require_one_label("this certifies")
    assert MultiLabelMasking(f"onnx:{path}", Threat.square(2), masks=2).scores == "probabilities"


@pytest.mark.parametrize("last", [nn.Softmax(1), nn.SiLU(), nn.Sequential(nn.Sigmoid(), nn.Linear(4, 4))])
def test_other_onnx_graphs_are_taken(last: nn.Module, tmp_path: Path) -> None:
    classifier = OnnxClassifier(exported(tmp_path, dynamo=True, last=last))
    classifier.require_one_label("this certifies")
    assert classifier.checked_logits(torch.rand(1, 3, 8, 8)).shape == (1, 4)
