"""Weights, configs and models from somebody else: they are read as data, or refused in one sentence."""

from __future__ import annotations

import builtins
import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from patchcleanser import load_classifier, load_dataset
from patchcleanser.errors import ClassifierError, DataError, InputError, TrustError
from patchcleanser.networks.builders import build_network


class Bomb:
    """Whoever unpickles it writes the canary."""

    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return Path.write_text, (self.canary, "code of a stranger ran")


@pytest.fixture
def canary(tmp_path: Path) -> Path:
    return tmp_path / "canary"


def test_the_bomb_works(canary: Path) -> None:
    pickle.loads(pickle.dumps(Bomb(canary)))
    assert canary.exists()


@pytest.mark.parametrize(
    "spec",
    [
        "net:tiny?weights={file}",
        "timm:test_resnet?weights={file}",
        "torchvision:squeezenet1_1?weights={file}",
        "timm:test_resnet?weights=none&checkpoint_path={file}",
    ],
)
def test_a_weight_file_runs_no_code(spec: str, canary: Path, tmp_path: Path) -> None:
    torch.save({"state_dict": {"conv1.weight": Bomb(canary)}}, tmp_path / "weights.pth")
    with pytest.raises(ClassifierError):
        load_classifier(spec.format(file=tmp_path / "weights.pth"), device="cpu")
    assert not canary.exists()


def card(folder: Path, spec: str) -> str:
    folder.mkdir()
    save_file(build_network("tiny", {}).state_dict(), folder / "model.safetensors")
    (folder / "card.json").write_text(json.dumps({"model": spec, "preprocessing": {"resize": [32, 32]}}))
    return f"trained:{folder}"


def test_python_trusts_a_card_only_if_it_is_told_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "stranger.py").write_text(
        "from patchcleanser.networks.builders import build_network\n"
        "def make(): return build_network('tiny', {}).eval()\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    spec = card(tmp_path / "card", "python:stranger:make")
    with pytest.raises(TrustError, match=r"card\.json names 'python:stranger:make', which runs code .*trust_code=True"):
        load_classifier(f"mirror:{spec}", device="cpu")
    assert load_classifier(f"mirror:{spec}", device="cpu", trust_code=True).code
    with pytest.raises(TrustError, match=r"list\.txt names 'python:stranger:make'"):
        load_classifier("python:stranger:make", device="cpu", named_by="list.txt")
    assert load_classifier("python:stranger:make", device="cpu").code


def test_an_option_inside_a_spec_gives_no_trust(tmp_path: Path) -> None:
    for number, query in enumerate(("trust_code=true", "named_by=", "trust_code=True&named_by=None")):
        spec = card(tmp_path / str(number), f"python:stranger:make?{query}")
        with pytest.raises(TrustError):
            load_classifier(spec, device="cpu")
        with pytest.raises(InputError, match="takes no options but classes"):
            load_classifier(f"{spec}?trust_code=true", device="cpu")


def test_a_card_does_not_choose_where_downloads_go(tmp_path: Path) -> None:
    with pytest.raises(TrustError, match="where downloads are put"):
        load_classifier(card(tmp_path / "card", f"timm:test_resnet?cache_dir={tmp_path}"), device="cpu")


def test_data_that_a_file_names_are_on_this_machine(tmp_path: Path) -> None:
    sample = Path(__file__).parents[2] / "src" / "patchcleanser" / "data" / "sample.parquet"
    for address in (sample, f"file://{sample}"):
        assert len(load_dataset(f"parquet:{address}", named_by="manifest.json")) == 300
    with pytest.raises(TrustError, match=r"manifest\.json names 'parquet:memory://nothing', which is an address"):
        load_dataset("parquet:memory://nothing", named_by="manifest.json")
    for options in ({}, {"named_by": "manifest.json", "trust_code": True}):
        with pytest.raises(DataError, match="no Parquet file at memory://nothing"):
            load_dataset("parquet:memory://nothing", **options)  # type: ignore[arg-type]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small ViT as Hugging Face keeps it; who asks a question on standard input fails the test."""
    transformers = pytest.importorskip("transformers")

    def ask(*words: object) -> str:
        raise RuntimeError(f"a question on standard input: {words}")

    monkeypatch.setattr(builtins, "input", ask)
    config = transformers.ViTConfig(
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
        image_size=32,
        patch_size=8,
    )
    transformers.ViTForImageClassification(config).save_pretrained(tmp_path / "vit")
    transformers.ViTImageProcessor(size={"height": 32, "width": 32}).save_pretrained(tmp_path / "vit")
    return tmp_path / "vit"


def change(path: Path, **settings: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))


def foreign_model(folder: Path, canary: Path) -> None:
    (folder / "modeling_evil.py").write_text(f"open({str(canary)!r}, 'w')\n")
    maps = {"AutoConfig": "modeling_evil.Config", "AutoModelForImageClassification": "modeling_evil.Model"}
    change(folder / "config.json", model_type="evil", auto_map=maps)


def foreign_processor(folder: Path, canary: Path) -> None:
    (folder / "processing_evil.py").write_text(f"open({str(canary)!r}, 'w')\n")
    maps = {"AutoImageProcessor": "processing_evil.Processor"}
    change(folder / "preprocessor_config.json", image_processor_type="Evil", auto_map=maps)


def pickled_weights(folder: Path, canary: Path) -> None:
    (folder / "model.safetensors").unlink()
    torch.save({"vit.embeddings.cls_token": Bomb(canary)}, folder / "pytorch_model.bin")


def kernel_from_the_hub(folder: Path, canary: Path) -> None:
    change(folder / "config.json", attn_implementation="stranger/kernel")


def adapter_of_another_model(folder: Path, canary: Path) -> None:
    (folder / "config.json").rename(folder / "adapter_config.json")
    change(folder / "adapter_config.json", base_model_name_or_path="stranger/model")


def malformed_config(folder: Path, canary: Path) -> None:
    (folder / "config.json").write_text('{"model_type": "vit", "hidden_size": "many"}')


def config_that_is_a_list(folder: Path, canary: Path) -> None:
    (folder / "config.json").write_text("[1, 2]")


def config_that_is_no_text(folder: Path, canary: Path) -> None:
    (folder / "config.json").write_bytes(b"\xff\xfe\x00")


def damaged_weights(folder: Path, canary: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"\xff" * 100)


def malformed_processor(folder: Path, canary: Path) -> None:
    change(folder / "preprocessor_config.json", size={"height": "a", "width": None}, resample="b")


@pytest.mark.parametrize(
    "make",
    [
        foreign_model,
        foreign_processor,
        pickled_weights,
        kernel_from_the_hub,
        adapter_of_another_model,
        malformed_config,
        config_that_is_a_list,
        config_that_is_no_text,
        damaged_weights,
        malformed_processor,
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_a_hostile_transformers_folder_is_one_sentence(
    make: Callable[[Path, Path], None], folder: Path, canary: Path
) -> None:
    make(folder, canary)
    with pytest.raises(ClassifierError) as error:
        load_classifier(f"transformers:{folder}", device="cpu")
    assert "\n" not in str(error.value)
    assert not canary.exists()


def test_an_honest_transformers_folder_loads(folder: Path) -> None:
    assert load_classifier(f"transformers:{folder}", device="cpu").classes == 2
    state = load_classifier(f"transformers:{folder}", device="cpu").module.state_dict()  # type: ignore[attr-defined]
    (folder / "model.safetensors").unlink()
    torch.save(state, folder / "pytorch_model.bin")  # pickled, but tensors only
    assert load_classifier(f"transformers:{folder}", device="cpu").classes == 2


@pytest.mark.parametrize("location", ["../secret.bin", "{folder}/secret.bin", "link.bin"])
def test_an_onnx_model_reads_no_weights_outside_its_folder(location: str, tmp_path: Path) -> None:
    onnx = pytest.importorskip("onnx")
    (tmp_path / "model").mkdir()
    (tmp_path / "secret.bin").write_bytes(np.zeros(36, np.float32).tobytes())
    (tmp_path / "model" / "link.bin").symlink_to(tmp_path / "secret.bin")
    weight = onnx.numpy_helper.from_array(np.zeros((12, 3), np.float32), "w")
    weight.ClearField("raw_data")
    weight.data_location = onnx.TensorProto.EXTERNAL
    for key, value in {"location": location.format(folder=tmp_path), "offset": "0", "length": "144"}.items():
        entry = weight.external_data.add()
        entry.key, entry.value = key, value
    tensor = onnx.helper.make_tensor_value_info
    graph = onnx.helper.make_graph(
        [onnx.helper.make_node("Flatten", ["x"], ["f"]), onnx.helper.make_node("MatMul", ["f", "w"], ["y"])],
        "g",
        [tensor("x", onnx.TensorProto.FLOAT, ["n", 3, 2, 2])],
        [tensor("y", onnx.TensorProto.FLOAT, ["n", 3])],
        [weight],
    )
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 17)], ir_version=9)
    (tmp_path / "model" / "model.onnx").write_bytes(model.SerializeToString())
    with pytest.raises(ClassifierError, match="outside its own folder"):
        load_classifier(f"onnx:{tmp_path}/model/model.onnx", device="cpu")
