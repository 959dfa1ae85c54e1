"""Hooks, replaced methods and caches decide labels too: a fingerprint says so, and stored ones stay valid."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial, wraps
from pathlib import Path
from types import MethodType
from typing import Any

import pytest
import timm
import torch
import torchvision
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

from patchcleanser import Job, Preprocessing, Threat, TorchClassifier, evaluate, load_classifier, load_dataset
from patchcleanser.data import chosen
from patchcleanser.errors import RecordError
from patchcleanser.records.run import Run

from .first_fingerprints import first_digest

STORED = {
    "zoo:tiny": "8fb1a2b4a4a5152511e3ec0471b7da278fa6a97260134a5ec032c862f459c521",
    "zoo:cifar10-resnet": "333169c782e65340f2264338fd2b7e377b01be03ba676137d6cc72a36de0cf92",
    "zoo:cifar10-vit": "b61dfe84b799973ffc567555d6832081570bc14a8243a02a60fee8f5ca1d7dc4",
    "zoo:cifar10-mlp": "aab787aefbdbeb05749c905e1dc05dd8230d24265253d94b8dab9150595e3eda",
    "inpaint:zoo:tiny": "c48b6af9b89fe3167db7a1408a2d4e149f2f7b726258c6e9b88de202b0c6cb17",
    "mirror:zoo:tiny": "8bc24d79355f147dc0217d73bffbbd215da465ad9587d56de6676497d6196cd2",
    "mirror:inpaint:zoo:cifar10-vit": "cb8495932ed2a86fd80e5325928d219afd5df3fdfc3957e4aa6ecac0208b54c9",
    "tokens:zoo:cifar10-vit": "faf789f00d007c4a41ce7bf0d90221c5beff0244040c3d983d1513999a71fdc9",
    "mean:zoo:tiny,mirror:zoo:tiny": "16d629760a05b1ad7d0db250ceeb149dc27041b6e118069f8770cd591b2a0ad2",
}
"""As they stand in manifests; zoo:tiny and zoo:cifar10-resnet in those of results/reproduce."""

TIMM = [
    "test_resnet",
    "test_vit",
    "test_efficientnet",
    "test_convnext",
    "levit_128s",
    "efficientvit_m0",
    "mobilenetv3_small_050",
    "convnext_atto",
    "edgenext_xx_small",
    "resmlp_12_224",
    "xcit_nano_12_p16_224",
    "vit_tiny_patch16_224",
]
TORCHVISION = ("resnet18", "mobilenet_v2", "squeezenet1_1", "shufflenet_v2_x0_5")


@pytest.mark.parametrize("spec", STORED)
def test_a_stored_fingerprint_is_still_that_of_its_model(spec: str) -> None:
    assert load_classifier(spec, device="cpu").fingerprint == STORED[spec]


@pytest.mark.parametrize("name", [*TIMM, *TORCHVISION])
def test_a_model_without_hooks_keeps_the_digest_of_the_first_runs(name: str) -> None:
    make = timm.create_model if name in TIMM else torchvision.models.get_model
    module = make(name, num_classes=10).eval()
    assert TorchClassifier(module).weights == first_digest(module)


@pytest.mark.parametrize("name", ["levit_128s", "efficientvit_m0", "efficientformerv2_s0"])
def test_a_cache_that_timm_fills_never_counts_even_if_it_was_full_before_anybody_looked(name: str) -> None:
    module = timm.create_model(name).eval()
    before = first_digest(module)
    with torch.inference_mode():
        module(torch.rand(1, 3, 224, 224))
    assert any(vars(layer).get("attention_bias_cache") for layer in module.modules())
    assert TorchClassifier(module).weights == before


SCALE = 2.0


def times(factor: float, output: Tensor) -> Tensor:
    return output * factor


def by_global(module: nn.Module, given: Any, output: Tensor) -> Tensor:
    return times(SCALE, output)


def by_number(factor: float, module: nn.Module, given: Any, output: Tensor) -> Tensor:
    return output * factor


def closure(factor: float) -> Callable[..., Tensor]:
    return lambda module, given, output: output * factor


def negative(module: nn.Module, given: Any, output: Tensor) -> Tensor:
    return -output


def defaulted(factor: float) -> Callable[..., Tensor]:
    def hook(module: nn.Module, given: Any, output: Tensor, factor: float = factor) -> Tensor:
        return output * factor

    return hook


def decorated(factor: float) -> Callable[..., Tensor]:
    return torch.no_grad()(closure(factor))


def disguised(factor: float) -> Callable[..., Tensor]:
    inner = closure(factor)

    @wraps(torch.relu)
    def relu(*given: Any) -> Tensor:
        return inner(*given)

    relu.__module__ = "torch"
    return relu


class Hook:
    """A hook with settings."""

    def __init__(self, factor: float) -> None:
        self.factor = factor

    def __call__(self, module: nn.Module, given: Any, output: Tensor) -> Tensor:
        return self.scaled(module, given, output)

    def scaled(self, module: nn.Module, given: Any, output: Tensor) -> Tensor:
        return output * self.factor


def network() -> Any:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(12, 4), nn.ReLU(), nn.Linear(4, 3)).eval()


def fingerprint(module: nn.Module) -> str:
    return TorchClassifier(module).fingerprint


HOOKS: dict[str, Callable[[float], Any]] = {
    "closure": closure,
    "partial": lambda factor: partial(by_number, factor),
    "bound method": lambda factor: Hook(factor).scaled,
    "object": Hook,
    "default": defaulted,
    "decorated": decorated,
    "disguised as torch's": disguised,
}


@pytest.mark.parametrize("kind", HOOKS)
def test_a_forward_hook_counts_with_what_it_holds(kind: str) -> None:
    prints = [fingerprint(network())]
    for factor in (2.0, 3.0, 2.0):
        module = network()
        module[1].register_forward_hook(HOOKS[kind](factor))
        prints.append(fingerprint(module))
    assert len(set(prints)) == 3
    assert prints[1] == prints[3]


def test_a_hook_that_is_removed_leaves_the_fingerprint_as_it_was() -> None:
    module = network()
    before = fingerprint(module)
    handle = module[1].register_forward_hook(negative)
    assert fingerprint(module) != before
    handle.remove()
    assert fingerprint(module) == before


def test_hooks_count_by_kind_place_and_order() -> None:
    def hooked(*places: int, pre: bool = False, kwargs: bool = False) -> str:
        module = network()
        for at in places:
            if pre:
                module[at].register_forward_pre_hook(lambda *given: None, with_kwargs=kwargs)
            else:
                module[at].register_forward_hook((negative, closure(2.0))[at % 2], with_kwargs=kwargs)
        return fingerprint(module)

    prints = [hooked(1), hooked(2), hooked(1, 2), hooked(1, pre=True), hooked(1, pre=True, kwargs=True)]
    assert len(set(prints)) == len(prints)
    first, second = network(), network()
    for module, hooks in ((first, (negative, closure(2.0))), (second, (closure(2.0), negative))):
        for hook in hooks:
            module[1].register_forward_hook(hook)
    assert fingerprint(first) != fingerprint(second)


def test_the_global_values_and_functions_that_a_hook_reaches_count(monkeypatch: pytest.MonkeyPatch) -> None:
    module = network()
    module.register_forward_hook(by_global)
    before = fingerprint(module)
    with monkeypatch.context() as patch:
        patch.setitem(globals(), "SCALE", 3.0)
        assert fingerprint(module) != before
    with monkeypatch.context() as patch:
        patch.setitem(globals(), "times", lambda factor, output: output - factor)
        assert fingerprint(module) != before
    assert fingerprint(module) == before


@pytest.fixture
def everywhere() -> Iterator[Callable[..., None]]:
    """Registers hooks of all modules, and takes them away."""
    handles: list[Any] = []
    yield lambda register, hook: handles.append(register(hook))
    for handle in handles:
        handle.remove()


@pytest.mark.parametrize("when", ["register_module_forward_hook", "register_module_forward_pre_hook"])
def test_a_hook_of_all_modules_counts(when: str, everywhere: Callable[..., None]) -> None:
    module = network()
    before = fingerprint(module)
    everywhere(getattr(nn.modules.module, when), closure(2.0))
    assert fingerprint(module) != before


@pytest.mark.parametrize(
    "replaced",
    [
        lambda module, factor: lambda x: nn.functional.linear(x, module.weight) * factor,
        lambda module, factor: MethodType(lambda self, x: nn.functional.linear(x, self.weight) * factor, module),
        lambda module, factor: partial(times, factor),
        lambda module, factor: scaled_linear(factor).forward,
    ],
    ids=["closure", "method", "partial", "another layer's method"],
)
def test_a_forward_that_was_replaced_on_a_layer_counts_by_what_it_does(replaced: Callable[..., Any]) -> None:
    prints = [fingerprint(network())]
    for factor in (2.0, 3.0, 2.0):
        module = network()
        module[1].forward = replaced(module[1], factor)
        prints.append(fingerprint(module))
    assert len(set(prints)) == 3
    assert prints[1] == prints[3]


def scaled_linear(factor: float) -> nn.Linear:
    torch.manual_seed(0)
    layer = nn.Linear(12, 4)
    layer.weight.data *= factor
    return layer


class Doubled(nn.Module):
    """A parametrization."""

    def forward(self, weight: Tensor) -> Tensor:
        return 2 * weight


@pytest.mark.parametrize(
    "change",
    [
        lambda layer: parametrize.register_parametrization(layer, "weight", Doubled()),
        lambda layer: parametrizations.weight_norm(layer),
    ],
    ids=["own", "weight norm"],
)
def test_a_weight_that_is_computed_from_others_is_another_weight(change: Callable[[nn.Module], Any]) -> None:
    module, plain = network(), fingerprint(network())
    change(module[1])
    module.eval()
    changed = fingerprint(module)
    assert changed != plain
    with torch.inference_mode():
        module(torch.rand(2, 3, 2, 2))
    assert fingerprint(module) == changed


class Remembering(nn.Module):
    """One of its caches is filled when it is needed, the other is a setting with an odd name."""

    def __init__(self, scale: Any) -> None:
        super().__init__()
        self.scale_cache = scale
        self.grid_cache: dict[int, Tensor] = {}
        self.last_cached: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        size = x.shape[-1]
        self.grid_cache.setdefault(size, torch.arange(size) + 1.0)
        self.last_cached = self.late_cache = self.grid_cache[size]
        return (x * self.last_cached * self.scale_cache).mean(dim=(2, 3))


@pytest.mark.parametrize("scales", [(2.0, 3.0), ({"a": 1}, {"a": 2}), (torch.ones(1), torch.zeros(1)), (True, False)])
def test_an_attribute_with_cache_in_its_name_counts(scales: tuple[Any, Any]) -> None:
    first, second = (fingerprint(Remembering(scale).eval()) for scale in scales)
    assert first != second
    assert first == fingerprint(Remembering(scales[0]).eval())


@pytest.mark.parametrize("looked", [True, False], ids=["after a fingerprint", "after it was wrapped"])
def test_a_cache_of_ones_own_that_was_empty_and_fills_does_not_count(looked: bool) -> None:
    module = Remembering(2.0).eval()
    classifier = TorchClassifier(module)
    fresh = fingerprint(Remembering(2.0).eval())
    before = classifier.fingerprint if looked else fresh
    module(torch.rand(1, 3, 4, 4))
    assert module.grid_cache
    assert classifier.fingerprint == before == fresh
    assert TorchClassifier(nn.Sequential(module).eval()).fingerprint != before


def test_a_full_cache_of_a_subclass_of_timms_layer_does_not_count() -> None:
    module = timm.create_model("levit_128s").eval()
    layer = next(layer for layer in module.modules() if "attention_bias_cache" in vars(layer))
    layer.__class__ = type("Mine", (type(layer),), {})
    before = fingerprint(module)
    with torch.inference_mode():
        module(torch.rand(1, 3, 224, 224))
    assert fingerprint(module) == before


PROGRAM = """
import torch
from torch import nn
from patchcleanser import TorchClassifier
torch.manual_seed(0)
module = nn.Sequential(nn.Flatten(), nn.Linear(12, 3)).eval()
table = {"b": 2.0, "a": 1.0}
def hook(m, given, output, names=frozenset({"a", "b"})):
    return output * table["a"] if "a" in {"a", "c", "d"} else None
module.register_forward_hook(hook)
module[1].forward = lambda x: module[1].weight.sum() + x
print(TorchClassifier(module).fingerprint)
"""


def test_processes_agree_on_the_fingerprint_of_a_hooked_model() -> None:
    command = [sys.executable, "-c", PROGRAM]
    prints = {
        subprocess.run(
            command, env={**os.environ, "PYTHONHASHSEED": seed}, capture_output=True, text=True, check=True
        ).stdout
        for seed in ("1", "2")
    }
    assert len(prints) == 1


def test_a_run_does_not_go_on_with_a_model_that_a_hook_made_another(tmp_path: Path) -> None:
    images = chosen(load_dataset("sample"), 2)
    torch.manual_seed(0)
    module = nn.Sequential(nn.Flatten(), nn.Linear(3072, 10)).eval()

    def run() -> Run:
        return evaluate(Job(TorchClassifier(module), images, Threat.square(5), masks=2), tmp_path / "run")

    before = run().read(["answer"])
    handle = module[1].register_forward_hook(negative)
    with pytest.raises(RecordError, match="holds a run of another job; it differs in classifier"):
        run()
    handle.remove()
    assert run().read(["answer"]) == before


def test_a_hook_that_only_records_does_not_stop_a_run(tmp_path: Path) -> None:
    recorded: list[Tensor] = []
    module = network()
    module.register_forward_hook(lambda layer, given, output: recorded.append(output))
    small = Preprocessing(resize=(2, 2))
    job = Job(TorchClassifier(module, small), chosen(load_dataset("sample"), 2), Threat.square(5), masks=2)
    job.dataset.labels[:] = 0
    assert evaluate(job, tmp_path / "run").finished
    assert recorded
