"""Modules and functions that return no logits are refused with what they returned, and how to mend it."""

import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from patchcleanser import (
    CallableClassifier,
    DoubleMasking,
    Threat,
    TorchClassifier,
)
from patchcleanser.errors import (
    ClassifierError,
    InputError,
    OutputError,
)

THREAT = Threat.square(4)


@pytest.fixture
def images() -> Tensor:
    return torch.rand(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    ("output", "words"),
    [
        (lambda x: x.mean(dim=(1, 2, 3)), r"must return logits \[4, classes\], got \(4,\)"),
        (lambda x: x.mean(dim=(0, 2, 3))[None], r"must return logits \[4, classes\], got \(1, 3\)"),
        (lambda x: x, r"must return logits \[4, classes\], got \(4, 3, 16, 16\)"),
        (lambda x: x.mean(), r"must return logits \[4, classes\], got \(\)"),
        (lambda x: x.mean(dim=(2, 3))[:, :1], "must return at least 2 classes .*, got 1"),
        (lambda x: x.mean(dim=(2, 3))[:, :0], "must return at least 2 classes .*, got 0"),
        (lambda x: x.mean(dim=(2, 3)) * float("nan"), "returned NaN or infinite logits; check its weights"),
        (lambda x: x.mean(dim=(2, 3)) + float("inf"), "returned NaN or infinite logits"),
        (lambda x: {"scores": x.mean(dim=(2, 3))}, "got dict; wrap the model in a module that returns the tensor"),
        (lambda x: [x.mean(dim=(2, 3))], "got list"),
        (lambda x: None, "got NoneType"),
        (lambda x: x.mean(dim=(2, 3)).numpy(), "got ndarray"),
        (lambda x: SimpleNamespace(logits=None), "got NoneType"),
    ],
)
def test_modules_that_return_no_logits_are_refused(output: Callable[[Tensor], Any], words: str, images: Tensor) -> None:
    class Wrong(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return output(x)

    with pytest.raises(OutputError, match=words):
        DoubleMasking(Wrong().eval(), THREAT, masks=2).predict(images[:1])


@pytest.mark.parametrize(
    ("output", "words"),
    [
        (lambda a: a.mean((1, 2, 3)), r"must return logits \[4, classes\], got \(4,\)"),
        (lambda a: a.mean((2, 3))[:, :1], "must return at least 2 classes .*, got 1"),
        (lambda a: a.mean((2, 3)) * np.nan, "returned NaN or infinite logits"),
        (lambda a: {"scores": a}, r"the function failed on float32 numpy images of shape \(4, 3, 16, 16\)"),
        (lambda a: ["cat"] * len(a), "the function failed on float32 numpy images"),
        (lambda a: None, "the function failed on float32 numpy images"),
        (lambda a: a @ np.ones(5), r"the function failed on .*\(4, 3, 16, 16\): ValueError: matmul"),
        (lambda a: a.no_such_thing, "the function failed on .*: AttributeError: .*no_such_thing"),
        (lambda a: {}["weights"], "the function failed on .*: KeyError: 'weights'"),
    ],
    ids=["one axis", "one class", "NaN", "dict", "words", "None", "ValueError", "AttributeError", "KeyError"],
)
def test_functions_that_return_no_scores_are_refused(output: Callable[[Any], Any], words: str, images: Tensor) -> None:
    with pytest.raises(OutputError, match=words):
        DoubleMasking(output, THREAT, masks=2).predict(images[:1])


def test_a_function_that_returns_a_dict_is_asked_for_scores_alone(images: Tensor) -> None:
    model = CallableClassifier(lambda x: {"logits": x.mean((2, 3))}, array="torch")
    with pytest.raises(OutputError, match=r"it returned a dict; return the scores \[N, classes\] alone"):
        model.logits(images)


def test_a_function_is_no_module() -> None:
    with pytest.raises(InputError, match='for a function use CallableClassifier\\(function, array="torch"\\)'):
        TorchClassifier(lambda x: x)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("network", "words"),
    [
        (nn.Conv2d(3, 4, 3), "TypeError: conv2d() received an invalid combination of arguments"),
        (nn.Sequential(nn.Flatten(), nn.Linear(3 * 16 * 16, 4)), "TypeError: flatten()"),
    ],
)
def test_a_function_of_tensors_is_told_in_one_line_how_to_get_them(
    network: nn.Module, words: str, images: Tensor
) -> None:
    network.eval()
    with pytest.raises(OutputError) as error:
        DoubleMasking(lambda x: network(x), THREAT, masks=2).predict(images[:1])
    message = str(error.value)
    assert words in message
    assert message.endswith('; for a function of torch tensors pass CallableClassifier(function, array="torch")')
    assert "\n" not in message
    assert len(message) < 400


def test_a_wrong_number_of_classes_is_refused(images: Tensor) -> None:
    means = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten()).eval()
    with pytest.raises(OutputError, match="must return 10 classes, got 3"):
        DoubleMasking(TorchClassifier(means, classes=10), THREAT, masks=2).predict(images)


@pytest.mark.parametrize(
    ("module", "shape"),
    [
        (nn.Sequential(nn.Flatten(), nn.Linear(3 * 16 * 16, 4)), (3, 20, 20)),
        (nn.Sequential(nn.Conv2d(3, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten()), (1, 16, 16)),
    ],
    ids=["another size", "another number of channels"],
)
def test_images_the_module_cannot_take_are_explained(module: nn.Module, shape: tuple[int, ...]) -> None:
    words = re.escape(f"the model failed on inputs of shape (4, {str(shape)[1:]}: RuntimeError: ")
    with pytest.raises(ClassifierError, match=words):
        DoubleMasking(module.eval(), THREAT, masks=2).predict(torch.rand(1, *shape))
