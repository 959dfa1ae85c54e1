"""The user's model, images and process are exactly as they were, whatever a defense did with them."""

import random
import sys
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import timm
import torch
from torch import Tensor, nn

from patchcleanser import ChallengerMasking, DoubleMasking, MinorityReports, Preprocessing, Threat, TorchClassifier
from patchcleanser.errors import NotAFunctionError, OutOfMemoryError, TrainModeError

Images = Callable[..., tuple[Tensor, Tensor]]

HOOKS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)


def module_facts(module: nn.Module) -> dict[str, Any]:
    """Everything about a module that a user could notice; tensors by value and by place in memory."""
    facts: dict[str, Any] = {"state": {k: v.detach().clone() for k, v in module.state_dict().items()}}
    facts["tensors"] = {
        name: (t.data_ptr(), t.stride(), t.dtype, t.device, t.requires_grad, t.grad is None, t._version)
        for name, t in [*module.named_parameters(), *module.named_buffers()]
    }
    facts["children"] = {
        name: {
            "type": type(child),
            "training": child.training,
            "keys": list(child.__dict__),
            "forward": (child.forward.__func__, "forward" in child.__dict__),
            "hooks": {kind: list(getattr(child, kind, {})) for kind in HOOKS},
            "geometry": [getattr(child, key, None) for key in ("stride", "padding", "dilation", "kernel_size")],
        }
        for name, child in module.named_modules()
    }
    facts["repr"] = repr(module)
    return facts


def process_facts() -> dict[str, Any]:
    """Global switches of torch and the process, and the state of every random generator."""
    return {
        "grad": torch.is_grad_enabled(),
        "inference": torch.is_inference_mode_enabled(),
        "dtype": torch.get_default_dtype(),
        "threads": torch.get_num_threads(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "matmul": torch.get_float32_matmul_precision(),
        "autocast": torch.is_autocast_enabled("cpu"),
        "anomaly": torch.is_anomaly_enabled(),
        "cudnn": [getattr(torch.backends.cudnn, k) for k in ("enabled", "benchmark", "deterministic", "allow_tf32")],
        "cuda": torch.backends.cuda.matmul.allow_tf32,
        "mkldnn": torch.backends.mkldnn.enabled,
        "torch random": torch.get_rng_state().tolist(),
        "numpy random": [str(part) for part in np.random.get_state()],
        "python random": random.getstate(),
        "warnings": list(warnings.filters),
        "path": list(sys.path),
        "numpy errors": np.geterr(),
    }


def assert_same(before: dict[str, Any], after: dict[str, Any]) -> None:
    assert before.keys() == after.keys()
    for key in before:
        if key == "state":
            assert before[key].keys() == after[key].keys()
            assert all(torch.equal(before[key][k], after[key][k]) for k in before[key])
        else:
            assert before[key] == after[key], key


class Stateful(nn.Module):
    """A convolution with a user's hook, a frozen layer and a forward of the instance's own."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, stride=2).to(memory_format=torch.channels_last)
        self.norm = nn.BatchNorm2d(4)
        self.drop = nn.Dropout(0.5)
        self.head = nn.Linear(4, 10)
        self.conv.requires_grad_(False)
        self.counter = 0
        self.norm.register_forward_hook(lambda module, args, output: None)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.drop(self.norm(self.conv(x)).relu().mean(dim=(2, 3))))


def small_transformer() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = transformers.ViTConfig(
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
        image_size=32,
        patch_size=16,
        num_labels=10,
    )
    return transformers.ViTForImageClassification(config)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "timm resnet": lambda: timm.create_model("test_resnet", num_classes=10),
    "timm vit": lambda: timm.create_model("test_vit", img_size=32, num_classes=10),
    "transformers vit": small_transformer,
    "hooks and frozen layers": Stateful,
}

DEFENSES = [DoubleMasking, ChallengerMasking, MinorityReports]


@pytest.fixture
def model(request: pytest.FixtureRequest) -> nn.Module:
    torch.manual_seed(0)
    return MODELS[request.param]().eval()


@pytest.mark.parametrize("defense", DEFENSES)
@pytest.mark.parametrize("grid", ["source", "input"])
@pytest.mark.parametrize("model", MODELS, indirect=True)
def test_predict_and_certify_leave_everything_as_it_was(
    model: nn.Module, grid: str, defense: type, preprocessing: Preprocessing, coloured: Images
) -> None:
    images, labels = coloured(3, (40, 36), seed=1)
    copies = images.clone()
    before, world = module_facts(model), process_facts()
    defended = defense(TorchClassifier(model, preprocessing), Threat.square(6, grid=grid), masks=2)
    defended.predict(images)
    defended.certify(images, labels)
    defended.certify(images, labels, maps=True)
    defended.as_module()(images)
    assert_same(world, process_facts())
    assert_same(before, module_facts(model))
    assert torch.equal(images, copies)


@pytest.mark.parametrize("model", MODELS, indirect=True)
def test_the_fingerprint_leaves_the_model_as_it_was(model: nn.Module) -> None:
    before, world = module_facts(model), process_facts()
    _ = TorchClassifier(model).fingerprint
    assert_same(world, process_facts())
    assert_same(before, module_facts(model))


@pytest.mark.parametrize("model", MODELS, indirect=True)
def test_the_model_can_be_trained_afterwards(model: nn.Module, preprocessing: Preprocessing, coloured: Images) -> None:
    images, labels = coloured(2, (32, 32), seed=1)
    DoubleMasking(TorchClassifier(model, preprocessing), Threat.square(6), masks=2).certify(images, labels)
    output = model.train()(preprocessing(images))
    logits = getattr(output, "logits", output)
    nn.functional.cross_entropy(logits, labels).backward()
    assert any(p.grad is not None and p.grad.abs().sum() > 0 for p in model.parameters())


@pytest.mark.parametrize("enabled", [True, False])
def test_the_callers_grad_mode_is_kept(
    enabled: bool, resnet: nn.Module, preprocessing: Preprocessing, coloured: Images
) -> None:
    images, labels = coloured(1, (32, 32), seed=1)
    with torch.set_grad_enabled(enabled):
        DoubleMasking(TorchClassifier(resnet, preprocessing), Threat.square(6), masks=2).certify(images, labels)
        assert torch.is_grad_enabled() is enabled
        assert not torch.is_inference_mode_enabled()


def test_images_that_require_grad_are_taken_and_left_alone(
    resnet: nn.Module, preprocessing: Preprocessing, coloured: Images
) -> None:
    images = coloured(1, (32, 32), seed=1)[0].requires_grad_()
    DoubleMasking(TorchClassifier(resnet, preprocessing), Threat.square(6), masks=2).predict(images)
    assert images.requires_grad
    assert images.grad is None


class Failing(Stateful):
    """Fails in the way it is told to, in the middle of the work."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.drop = how, nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "memory":
            raise torch.OutOfMemoryError("out of memory, says the test")
        logits = super().forward(x)
        return logits - 100 * logits.mean(dim=0) if self.how == "batch" else logits


@pytest.mark.parametrize(("how", "error"), [("memory", OutOfMemoryError), ("batch", NotAFunctionError)])
def test_a_failure_leaves_everything_as_it_was(how: str, error: type, coloured: Images) -> None:
    torch.manual_seed(0)
    model = Failing(how).eval()
    images, _ = coloured(2, (32, 32), seed=1)
    before, world = module_facts(model), process_facts()
    with pytest.raises(error):
        DoubleMasking(model, Threat.square(6), masks=3).predict(images)
    assert_same(world, process_facts())
    assert_same(before, module_facts(model))


def test_a_refused_model_stays_in_train_mode(resnet: nn.Module, coloured: Images) -> None:
    classifier = TorchClassifier(resnet)
    resnet.train()
    before, world = module_facts(resnet), process_facts()
    with pytest.raises(TrainModeError):
        DoubleMasking(classifier, Threat.square(6), masks=2).predict(coloured(1, (32, 32), seed=1)[0])
    with pytest.raises(TrainModeError):
        TorchClassifier(resnet)
    assert_same(world, process_facts())
    assert_same(before, module_facts(resnet))
