"""A fingerprint names everything that decides a label: if two differ in function, they differ in fingerprint."""

import os
import subprocess
import sys
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torchvision.models.resnet import Bottleneck, ResNet

from patchcleanser import CallableClassifier, DoubleMasking, Preprocessing, Threat, TorchClassifier, load_classifier
from patchcleanser.classifiers.onnx import OnnxClassifier, external_files
from patchcleanser.errors import ClassifierError


def nudge_weight(module: nn.Module) -> None:
    module.conv1[0].weight.data.view(-1)[5] += 1e-6


def nudge_bias(module: nn.Module) -> None:
    module.fc.bias.data[-1] += 1e-6


def nudge_running_mean(module: nn.Module) -> None:
    next(m for m in module.modules() if isinstance(m, nn.BatchNorm2d)).running_mean[0] += 1e-6


def swap_two_weights(module: nn.Module) -> None:
    weight = module.fc.weight.data
    weight[[0, 1]] = weight[[1, 0]]


def change_activation(module: nn.Module) -> None:
    module.act1 = nn.LeakyReLU(0.1).eval()


def change_epsilon(module: nn.Module) -> None:
    next(m for m in module.modules() if isinstance(m, nn.BatchNorm2d)).eps = 1e-3


def change_precision(module: nn.Module) -> None:
    module.double()


def add_hidden_buffer(module: nn.Module) -> None:
    module.register_buffer("offset", torch.ones(1), persistent=False)


def hook_the_output(module: nn.Module) -> None:
    module.register_forward_hook(lambda layer, inputs, output: -output)


def hook_the_input(module: nn.Module) -> None:
    module.fc.register_forward_pre_hook(lambda layer, inputs: (-inputs[0],))


CHANGES = [
    nudge_weight,
    nudge_bias,
    nudge_running_mean,
    swap_two_weights,
    change_activation,
    change_epsilon,
    change_precision,
    add_hidden_buffer,
    hook_the_output,
    hook_the_input,
]


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_model_has_another_fingerprint(change: Callable[[nn.Module], None], resnet: nn.Module) -> None:
    classifier = TorchClassifier(resnet)
    before = classifier.fingerprint
    change(resnet)
    assert classifier.fingerprint != before
    assert TorchClassifier(resnet).fingerprint == classifier.fingerprint


def test_undoing_a_change_restores_the_fingerprint(resnet: nn.Module) -> None:
    classifier = TorchClassifier(resnet)
    before, bias = classifier.fingerprint, resnet.fc.bias.detach().clone()
    nudge_bias(resnet)
    resnet.fc.bias.data.copy_(bias)
    assert classifier.fingerprint == before


def test_asking_for_labels_does_not_change_the_fingerprint(
    resnet: nn.Module, preprocessing: Preprocessing, coloured: Callable[..., tuple[Tensor, Tensor]]
) -> None:
    classifier = TorchClassifier(resnet, preprocessing)
    before = classifier.fingerprint
    DoubleMasking(classifier, Threat.square(6), masks=2).certify(*coloured(2, (32, 32), seed=0))
    assert classifier.fingerprint == before


def test_a_cache_that_fills_does_not_change_the_fingerprint() -> None:
    module = timm.create_model("levit_128s").eval()
    classifier = TorchClassifier(module)
    before = classifier.fingerprint
    with torch.inference_mode():
        module(torch.rand(1, 3, 224, 224))
    assert classifier.fingerprint == before


@pytest.mark.parametrize(
    "change",
    [
        {"resize": 40},
        {"resize": (32, 33)},
        {"crop": (32, 32)},
        {"interpolation": "bicubic"},
        {"mean": (0.5, 0.5, 0.5000001)},
        {"std": (0.5, 0.4, 0.5)},
        {"fill": (0.0, 0.0, 0.0)},
        {"crop_rounding": "down"},
    ],
    ids=lambda change: next(iter(change)),
)
def test_changed_preprocessing_has_another_fingerprint(
    change: dict, resnet: nn.Module, preprocessing: Preprocessing
) -> None:
    classifier, other = TorchClassifier(resnet, preprocessing), replace(preprocessing, **change)
    assert TorchClassifier(resnet, other).fingerprint != classifier.fingerprint
    assert TorchClassifier(resnet, replace(preprocessing)).fingerprint == classifier.fingerprint


def test_resnet_v1_and_v1_5_with_the_same_weights_differ() -> None:
    torch.manual_seed(0)
    newer, older = (ResNet(Bottleneck, [1, 1, 1, 1], num_classes=4).eval() for _ in range(2))
    older.load_state_dict(newer.state_dict())
    assert TorchClassifier(newer).fingerprint == TorchClassifier(older).fingerprint
    for block in older.modules():
        if isinstance(block, Bottleneck):  # v1 strides in the 1×1 convolution, v1.5 in the 3×3 one
            block.conv1.stride, block.conv2.stride = block.conv2.stride, block.conv1.stride
    images = torch.rand(1, 3, 64, 64, generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        assert not torch.allclose(newer(images), older(images))
    assert all(torch.equal(a, b) for a, b in zip(newer.state_dict().values(), older.state_dict().values(), strict=True))
    assert TorchClassifier(newer).fingerprint != TorchClassifier(older).fingerprint


class Scaled(nn.Module):
    """Its whole behaviour hangs on a plain attribute."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        return x.mean(dim=(2, 3)) * self.factor


@dataclass
class Options:
    """Settings as many users keep them."""

    factor: float


class Holder(nn.Module):
    """Its behaviour hangs on whatever it holds: options, a function, a bare tensor."""

    def __init__(self, held: Any) -> None:
        super().__init__()
        self.held, self.owner = held, [self]  # a circle, as callbacks make them

    def forward(self, x: Tensor) -> Tensor:
        light = x.mean(dim=(2, 3))
        if callable(self.held):
            return self.held(light)
        return light * getattr(self.held, "factor", self.held)


def ordered(names: str) -> nn.Module:
    torch.manual_seed(0)
    layers = {"a": nn.Softmax(dim=1), "b": nn.ReLU()}
    return nn.Sequential(nn.Conv2d(3, 3, 32), nn.Flatten(), nn.Sequential(OrderedDict((n, layers[n]) for n in names)))


def quantised(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    module = nn.Sequential(nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(12, 3)).eval()
    return torch.ao.quantization.quantize_dynamic(module, {nn.Linear})


def hugging_face_heads(heads: int) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.ViTConfig(
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=heads,
        intermediate_size=32,
        image_size=32,
        patch_size=8,
        initializer_range=0.5,
    )
    return Unpacked(transformers.ViTForImageClassification(config))


class Unpacked(nn.Module):
    """The logits of a transformers model."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x).logits


def attention_heads(heads: int) -> nn.Module:
    torch.manual_seed(0)
    return timm.create_model("test_vit", img_size=32, num_classes=3, num_heads=heads).eval()


@pytest.mark.parametrize(
    ("make", "settings"),
    [
        (Scaled, (1.0, -1.0)),
        (attention_heads, (2, 4)),
        (hugging_face_heads, (2, 4)),
        (Holder, (Options(1.0), Options(-1.0))),
        (Holder, (torch.sin, torch.cos)),
        (Holder, (partial(torch.add, other=1), partial(torch.add, other=2))),
        (Holder, (torch.tensor(1.0), torch.tensor(2.0))),
        (Holder, (np.float32(1.0), np.float32(2.0))),
        (ordered, ("ab", "ba")),
        (quantised, (0, 1)),
        (lambda factor: torch.jit.script(Scaled(factor)), (1.0, -1.0)),
    ],
    ids=[
        "plain attribute",
        "timm num_heads",
        "transformers num_attention_heads",
        "dataclass",
        "function",
        "partial",
        "bare tensor",
        "numpy number",
        "order",
        "quantised weights",
        "TorchScript",
    ],
)
@pytest.mark.filterwarnings("ignore:.*deprecated")
def test_settings_that_are_neither_weights_nor_shown_count_too(make: Callable[..., nn.Module], settings: tuple) -> None:
    first, second = (make(setting).eval() for setting in settings)
    images = torch.rand(2, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        if torch.allclose(first(images), second(images), atol=1e-5):
            raise RuntimeError("the two models compute the same, so this test shows nothing")
    assert TorchClassifier(first).fingerprint != TorchClassifier(second).fingerprint
    assert TorchClassifier(make(settings[0]).eval()).fingerprint == TorchClassifier(first).fingerprint


PROGRAM = """
import functools, sys, torch
from torch import nn
from patchcleanser import TorchClassifier, load_classifier
torch.manual_seed(0)
model = load_classifier("timm:test_vit?weights=none", device="cpu").module
model.held = [torch.relu, functools.partial(torch.add, other=1), {"b", "a", "c"}, nn.Linear]
model.more = [model.forward, torch.Generator(), torch.device("cpu"), lambda x: x, object()]
print(TorchClassifier(model).fingerprint, TorchClassifier(torch.compile(model)).fingerprint)
"""


def test_processes_agree_on_a_fingerprint() -> None:
    prints = {
        subprocess.run(
            [sys.executable, "-c", PROGRAM],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(prints) == 1


def test_a_transformers_model_and_its_folder_have_one_fingerprint(tmp_path: Path) -> None:
    model = hugging_face_heads(2).inner.eval()
    before = TorchClassifier(model).fingerprint
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path).eval()
    assert before == TorchClassifier(model).fingerprint == TorchClassifier(loaded).fingerprint


def test_two_loads_of_the_same_weights_agree(tmp_path: Path, resnet: nn.Module) -> None:
    save_file(resnet.state_dict(), tmp_path / "m.safetensors")
    torch.save(resnet.state_dict(), tmp_path / "m.pth")
    spec = f"timm:test_resnet?num_classes=10&weights={tmp_path}/m."
    first, second, third = (
        load_classifier(spec + suffix, device="cpu").fingerprint for suffix in ("safetensors", "safetensors", "pth")
    )
    assert first == second == third


def test_two_random_models_differ() -> None:
    first, second = (load_classifier("timm:test_resnet?weights=none", device="cpu") for _ in range(2))
    assert first.fingerprint != second.fingerprint


def test_the_fingerprint_is_a_sha256(resnet: nn.Module) -> None:
    fingerprint = TorchClassifier(resnet).fingerprint
    assert len(fingerprint) == 64
    int(fingerprint, 16)


def brightness(array: np.ndarray) -> np.ndarray:
    light = array.mean(axis=(1, 2, 3))
    return np.stack([light, 1 - light], axis=1)


def test_a_function_without_a_name_has_no_fingerprint() -> None:
    with pytest.raises(ClassifierError, match=r"a plain function has no weights to hash.*fingerprint="):
        _ = CallableClassifier(brightness).fingerprint


def test_a_function_without_a_name_still_predicts() -> None:
    assert DoubleMasking(brightness, Threat.square(2), masks=2).predict(torch.ones(1, 3, 8, 8))[0].label == 0


@pytest.mark.parametrize(
    "other",
    [
        {"fingerprint": "brightness-2"},
        {"array": "torch"},
        {"outputs": "probabilities"},
        {"preprocessing": Preprocessing(fill=(0.0,))},
    ],
    ids=lambda other: next(iter(other)),
)
def test_a_named_functions_fingerprint_follows_its_name_and_settings(other: dict) -> None:
    named = CallableClassifier(brightness, fingerprint="brightness-1").fingerprint
    assert CallableClassifier(brightness, fingerprint="brightness-1").fingerprint == named
    assert CallableClassifier(brightness, **{"fingerprint": "brightness-1", **other}).fingerprint != named


def write_onnx(path: Path, *, bias: float, external: str | None = None) -> Path:
    """A linear classifier as ONNX, with its weights inside the file or in another one."""
    onnx = pytest.importorskip("onnx")
    flat = onnx.helper.make_node("Flatten", ["x"], ["flat"])
    linear = onnx.helper.make_node("Gemm", ["flat", "w", "b"], ["logits"])
    weight = np.random.default_rng(0).normal(size=(48, 300)).astype(np.float32)
    graph = onnx.helper.make_graph(
        [flat, linear],
        "linear",
        [onnx.helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, ["n", 3, 4, 4])],
        [onnx.helper.make_tensor_value_info("logits", onnx.TensorProto.FLOAT, ["n", 300])],
        [
            onnx.numpy_helper.from_array(weight, "w"),
            onnx.numpy_helper.from_array(np.full(300, bias, dtype=np.float32), "b"),
        ],
    )
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 17)], ir_version=9)
    options = {} if external is None else {"save_as_external_data": True, "location": external, "size_threshold": 0}
    onnx.save_model(model, path, **options)
    return path


def test_every_external_file_of_an_onnx_model_is_found(tmp_path: Path) -> None:
    onnx = pytest.importorskip("onnx")
    path = write_onnx(tmp_path / "model.onnx", bias=0.0, external="w" * 200)
    model = onnx.load(path, load_external_data=False)
    model.graph.initializer[1].external_data[0].value = "sub folder/bias.bin"
    assert external_files(path.read_bytes()) == {"w" * 200}
    assert external_files(model.SerializeToString()) == {"w" * 200, "sub folder/bias.bin"}


@pytest.mark.parametrize(
    "external",
    [None, "model.onnx.data", "weights.bin", f"{'w' * 150}.bin"],
    ids=["inside", "beside", "beside under another name", "beside under a long name"],
)
def test_the_onnx_fingerprint_follows_the_weights_in_the_files(tmp_path: Path, external: str | None) -> None:
    prints, logits = [], []
    for folder, bias in (("a", 0.0), ("b", 0.0), ("c", 1.0)):
        (tmp_path / folder).mkdir()
        classifier = OnnxClassifier(write_onnx(tmp_path / folder / "model.onnx", bias=bias, external=external))
        prints.append(classifier.fingerprint)
        logits.append(classifier.logits(torch.ones(1, 3, 4, 4)))
    assert torch.allclose(logits[2], logits[0] + 1, atol=1e-5)
    assert prints[0] == prints[1]
    assert prints[0] != prints[2]


def test_the_onnx_fingerprint_follows_the_preprocessing(tmp_path: Path) -> None:
    path = write_onnx(tmp_path / "model.onnx", bias=0.0)
    assert OnnxClassifier(path).fingerprint == OnnxClassifier(path).fingerprint
    assert OnnxClassifier(path).fingerprint != OnnxClassifier(path, Preprocessing(resize=(4, 4))).fingerprint


def test_a_loaded_onnx_model_keeps_its_fingerprint_when_its_file_is_replaced(tmp_path: Path) -> None:
    classifier = OnnxClassifier(write_onnx(tmp_path / "model.onnx", bias=0.0))
    before, logits = classifier.fingerprint, classifier.logits(torch.ones(1, 3, 4, 4))
    write_onnx(tmp_path / "model.onnx", bias=1.0)
    if not torch.equal(classifier.logits(torch.ones(1, 3, 4, 4)), logits):
        pytest.skip("the session reads the file anew, so its fingerprint should too")
    assert classifier.fingerprint == before
