"""Weights from the hub: asked for where they can be had, and refused at once where they cannot."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import timm
import torchvision

from patchcleanser import load_classifier
from patchcleanser.errors import ClassifierError

NAME = "test_resnet.r160_in1k"


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[socket.socket]:
    """A hub's address at which nobody listens yet, no proxy, and an empty cache."""
    for name in ("http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", f"http://127.0.0.1:{server.getsockname()[1]}")
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
        yield server


@pytest.fixture
def weight_requests(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether timm was asked for weights, each time; it gets none."""
    calls: list[bool] = []
    make = timm.create_model

    def create(name: str, *, pretrained: bool, **options: Any) -> Any:
        calls.append(pretrained)
        return make(name, **options)

    monkeypatch.setattr(timm, "create_model", create)
    return calls


def test_a_hub_out_of_reach_is_reported_at_once_with_the_fix(hub: socket.socket, weight_requests: list[bool]) -> None:
    with pytest.raises(ClassifierError, match=r"no weights for timm:test_resnet\.r160_in1k on this machine") as error:
        load_classifier(f"timm:{NAME}", device="cpu")
    assert "127.0.0.1 cannot be reached (" in str(error.value)
    assert "give a file with weights=PATH, or weights=none for random ones" in str(error.value)
    assert weight_requests == []  # timm's own client would have tried for most of a minute


def test_a_hub_that_answers_is_asked(hub: socket.socket, weight_requests: list[bool]) -> None:
    hub.listen()
    load_classifier(f"timm:{NAME}", device="cpu")
    assert weight_requests == [True]


def test_weights_in_the_cache_need_no_hub(hub: socket.socket, weight_requests: list[bool], tmp_path: Path) -> None:
    repo = tmp_path / "cache" / f"models--timm--{NAME}"
    for path, content in {"refs/main": "abc", "snapshots/abc/model.safetensors": "weights"}.items():
        (repo / path).parent.mkdir(parents=True)
        (repo / path).write_text(content)
    load_classifier(f"timm:{NAME}", device="cpu")
    assert weight_requests == [True]


def test_behind_a_proxy_only_the_client_can_tell(
    hub: socket.socket, weight_requests: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("https_proxy", "http://proxy:3128")
    load_classifier(f"timm:{NAME}", device="cpu")
    assert weight_requests == [True]


@pytest.mark.parametrize("name", ["absent", "google/vit-base-patch16-224"])
def test_a_transformers_model_is_not_tried_for_on_a_hub_out_of_reach(
    name: str, hub: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    load = pytest.importorskip("transformers").AutoModelForImageClassification
    monkeypatch.setattr(load, "from_pretrained", lambda *words, **options: pytest.fail("it tries for half a minute"))
    with pytest.raises(
        ClassifierError, match=f"'{name}': it is neither a folder nor a model of the hub on this"
    ) as error:
        load_classifier(f"transformers:{name}", device="cpu")
    assert "127.0.0.1 cannot be reached (Connection refused); name a folder that save_pretrained wrote" in str(
        error.value
    )


def test_torchvision_is_not_tried_for_on_a_host_out_of_reach(
    hub: socket.socket, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    weights = torchvision.models.SqueezeNet1_1_Weights.IMAGENET1K_V1
    monkeypatch.setattr(weights.value, "url", f"{huggingface_hub.constants.ENDPOINT}/weights.pth")
    with pytest.raises(ClassifierError, match=r"squeezenet1_1 on this machine, and 127\.0\.0\.1 cannot be reached \("):
        load_classifier("torchvision:squeezenet1_1", device="cpu")
    assert list(tmp_path.iterdir()) == []


def test_random_weights_need_no_hub(hub: socket.socket, weight_requests: list[bool]) -> None:
    load_classifier(f"timm:{NAME}?weights=none", device="cpu")
    assert weight_requests == [False]
