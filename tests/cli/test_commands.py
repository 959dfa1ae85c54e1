"""train and harden: words, files, exit codes; and what only a process of its own can show."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from patchcleanser import DoubleMasking, Threat, load_classifier
from patchcleanser.classifiers.torch import TorchClassifier
from patchcleanser.classifiers.trained import bare_spec, read_card, zoo_folder
from patchcleanser.data import load_dataset
from patchcleanser.data.codec import as_picture
from patchcleanser.errors import PatchCleanserError
from patchcleanser.networks.builders import build_network
from patchcleanser.training.artifacts import write_model

from .conftest import Command

QUICK = ["--data", "sample", "--set", "batch=50", "--set", "holdout=0.1", "--device", "cpu"]


def as_process(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "patchcleanser", *words]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)


def test_help_is_quick_to_say_what_there_is() -> None:
    done = as_process("--help")
    assert done.returncode == 0
    assert "train" in done.stdout
    assert "harden" in done.stdout


def test_train_writes_weights_and_a_card_that_load(run: Command, tmp_path: Path) -> None:
    out = tmp_path / "run"
    done = run("train", "--model", "net:tiny", "--set", "epochs=1", *QUICK, "--out", str(out), "--json")
    assert done.code == 0, done.err
    card = json.loads(done.out)
    assert card == json.loads((out / "card.json").read_text())
    assert not (out / "checkpoint.pt").exists()
    assert card["data"]["images"] == 300
    assert card["recipe"]["epochs"] == 1
    assert len(card["weights_sha256"]) == 64
    model = load_classifier(f"trained:{out}", device="cpu")
    verdicts = DoubleMasking(model, Threat.square(5), masks=2).predict([load_dataset("sample").image(0)])
    assert 0 <= verdicts[0].label < 10
    again = run("train", "--model", "net:tiny", *QUICK, "--out", str(out))
    assert again.code == 2
    assert "holds a finished run; use it as trained:" in again.err


def test_training_goes_on_from_a_finished_model_and_the_card_names_its_weights_by_their_hash(
    run: Command, tmp_path: Path
) -> None:
    first = read_card(zoo_folder("tiny"))
    change = ("--set", "epochs=1", "--set", "rate=1e-9")
    done = run("train", "--model", "zoo:tiny", *change, *QUICK, "--out", str(tmp_path), "--json")
    assert done.code == 0, done.err
    card = json.loads(done.out)
    assert card["model"] == first["model"]  # the network, wherever its weights came from
    assert card["start"] == {"model": "zoo:tiny", "weights_sha256": first["weights_sha256"]}
    assert card["best_epoch"]["accuracy"] > 0.5  # it did not start from nothing


def test_a_finished_network_goes_on_with_other_classes_behind_a_new_last_layer(run: Command, tmp_path: Path) -> None:
    pictures, out = tmp_path / "pictures", tmp_path / "out"
    sample = load_dataset("sample")
    for index in range(30):
        folder = pictures / ("red", "green", "blue")[index % 3]
        folder.mkdir(parents=True, exist_ok=True)
        as_picture(sample.image(index)).save(folder / f"{index}.png")
    small = ("--data", f"folder:{pictures}", "--set", "epochs=1", "--set", "batch=10", "--device", "cpu")
    refused = run("train", "--model", "zoo:tiny", *small, "--out", str(out))
    assert refused.code == 2
    assert "10 classes, the data has 3; write trained:FOLDER?classes=3" in refused.err
    change = ("--set", "rate=1e-9", "--set", "holdout=0")
    done = run("train", "--model", "inpaint:zoo:tiny?classes=3", *small, *change, "--out", str(out), "--json")
    assert done.code == 0, done.err
    card = json.loads(done.out)
    assert card["model"] == "inpaint:net:tiny?classes=3"
    assert card["start"]["weights_sha256"] == read_card(zoo_folder("tiny"))["weights_sha256"]
    old, new = (load_classifier(spec, device="cpu") for spec in ("zoo:tiny", f"trained:{out}"))
    assert isinstance(old, TorchClassifier)
    assert isinstance(new, TorchClassifier)
    assert new.classes == 3
    assert set(new.names or ()) == {"blue", "green", "red"}
    before, after = old.module.state_dict(), new.module.network.state_dict()  # type: ignore[union-attr,operator]
    assert torch.allclose(before["conv1.weight"], after["conv1.weight"], atol=1e-3)
    assert after["fc.weight"].shape[0] == 3


def test_torchvisions_networks_and_ones_own_can_be_trained_though_they_do_not_say_their_classes(
    run: Command, tmp_path: Path
) -> None:
    (tmp_path / "ones_own.py").write_text(
        "import torchvision\nfrom patchcleanser import Preprocessing, TorchClassifier\n"
        "def make(classes=10):\n"
        "    network = torchvision.models.squeezenet1_1(num_classes=classes).eval()\n"
        "    return TorchClassifier(network, Preprocessing((64, 64)))\n"
    )
    small = ("--limit", "20", "--set", "epochs=1")
    for number, model in enumerate(
        ("torchvision:squeezenet1_1?weights=none&num_classes=10&size=64", "python:ones_own:make")
    ):
        out = tmp_path / str(number)
        done = run("train", "--model", model, *QUICK, *small, "--out", str(out), "--json")
        assert done.code == 0, done.err
    wrong = run("train", "--model", "python:ones_own:make?classes=7", *QUICK, "--out", str(tmp_path / "no"))
    assert wrong.code == 2
    assert "the network has 7 classes, the data has 10" in wrong.err


def test_several_networks_are_not_trained_as_one(run: Command, tmp_path: Path) -> None:
    done = run("train", "--model", "mirror:mean:zoo:tiny,zoo:tiny", *QUICK, "--out", str(tmp_path / "out"))
    assert done.code == 2
    assert "is several networks, which learn one by one" in done.err


def test_a_new_last_layer_is_refused_where_it_cannot_be(tmp_path: Path) -> None:
    write_model(build_network("tiny", {}), tmp_path, {"model": "transformers:net", "preprocessing": {}})
    for spec, words in (
        (f"trained:{tmp_path}?classes=3", "transformers:net cannot be given 3 classes"),
        ("zoo:tiny?classes=10", "has no last layer of another number of classes than 10"),
        ("zoo:tiny?classes=none", "classes is a whole number from 2 to 100,000, got 'none'"),
        ("zoo:tiny?classes=true", "classes is a whole number from 2 to 100,000, got True"),
        ("zoo:tiny?classes=1", "classes is a whole number from 2 to 100,000, got 1"),
        ("zoo:tiny?classes=99999999999", "got 99999999999"),
        ("zoo:tiny?wider=2", "takes no options but classes"),
    ):
        with pytest.raises(PatchCleanserError, match=re.escape(words)):
            load_classifier(spec, device="cpu")


@pytest.mark.parametrize("query", ["?classes=3", "?&classes=3"])
def test_a_new_last_layer_keeps_all_else_that_the_card_says(tmp_path: Path, query: str) -> None:
    """Timm's own way to a new last layer forgets how the old one was pooled for."""
    network = "timm:test_resnet?weights=none&global_pool=catavgmax&num_classes=10"
    first = load_classifier(network, device="cpu")
    assert isinstance(first, TorchClassifier)
    metadata = {"preprocessing": vars(first.preprocessing)}
    write_model(first.module, tmp_path / "old", {"model": network, **metadata})
    begun = load_classifier(f"trained:{tmp_path / 'old'}{query}", device="cpu")
    assert isinstance(begun, TorchClassifier)
    spec = bare_spec(f"trained:{tmp_path / 'old'}{query}")
    write_model(begun.module, tmp_path / "new", {"model": spec, **metadata})
    again = load_classifier(f"trained:{tmp_path / 'new'}", device="cpu")
    inputs = again.prepare(torch.rand(2, 3, 160, 160))
    with torch.inference_mode():
        assert torch.allclose(again.logits(inputs), begun.logits(inputs), atol=1e-2)
    assert again.logits(inputs).shape == (2, 3)


def test_train_reads_no_image_beyond_the_limit(run: Command, tmp_path: Path) -> None:
    for number in range(20):
        (tmp_path / "photos" / "cat").mkdir(parents=True, exist_ok=True)
        as_picture(load_dataset("sample").image(number)).save(tmp_path / "photos" / "cat" / f"{number:02d}.png")
    (tmp_path / "photos" / "dog").mkdir()
    (tmp_path / "photos" / "dog" / "broken.png").write_text("no picture")
    words = ["train", "--model", "net:tiny?classes=2", "--data", f"folder:{tmp_path / 'photos'}", "--set", "epochs=1"]
    words += ["--set", "batch=10", "--device", "cpu"]
    done = run(*words, "--limit", "20", "--out", str(tmp_path / "few"))
    assert done.code == 0, done.err
    assert read_card(tmp_path / "few")["data"]["images"] == 20
    assert "broken.png" in run(*words, "--out", str(tmp_path / "all")).err


def test_harden_writes_a_copy_that_loads(run: Command, tmp_path: Path) -> None:
    out = tmp_path / "hard"
    words = ["--model", "zoo:tiny", "--images", "sample", "--patch", "5", "--limit", "40", "--epochs", "1"]
    done = run("harden", *words, "--device", "cpu", "--out", str(out))
    assert done.code == 0, done.err
    assert "invariance" in done.out
    assert "agreement" in done.err
    card = json.loads((out / "card.json").read_text())
    assert card["model"] == "net:tiny"  # the network itself, not the folder it came from
    assert card["photos"]["number"] == 40
    assert load_classifier(f"trained:{out}", device="cpu").classes == 10


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["train", "--model", "net:tiny", "--recipe", "secret"], "no recipe 'secret'; there are paper, scratch-cifar"),
        (["train", "--model", "net:huge"], "no network 'huge'; there are resnet, vit, resmlp, tiny"),
        (["train", "--model", "net:tiny", "--set", "epochs"], "--set takes name=value, got 'epochs'"),
        (["train", "--model", "net:tiny", "--set", "epoch=3"], "a recipe has no setting 'epoch'"),
        (["train", "--model", "net:tiny?classes=7", "--data", "sample"], "7 classes, the data has 10"),
        (["train", "--model", "net:tiny", "--data", "nowhere"], "no dataset 'nowhere'"),
        (["train", "--model", "net:tiny", "--data", "sample", "--patch", "5cm"], "cannot read patch '5cm'"),
        (["harden", "--model", "zoo:nothing", "--images", "sample"], "no zoo model 'nothing'; there are cifar10-mlp"),
        (["harden", "--model", "zoo:tiny", "--images", "nowhere"], "no dataset 'nowhere'"),
        (["harden", "--model", "zoo:tiny", "--images", "sample", "--device", "tpu"], "device 'tpu' cannot be used"),
    ],
)
def test_mistakes_get_one_clear_sentence(run: Command, tmp_path: Path, words: list[str], message: str) -> None:
    done = run(*words, "--out", str(tmp_path / "out"))
    assert done.code == 2
    assert message in done.err.replace("\n", " ")
    assert "Traceback" not in done.err


def test_ctrl_c_says_how_to_go_on_and_the_same_command_does(tmp_path: Path) -> None:
    out = tmp_path / "run"
    words = ["train", "--model", "net:tiny", "--set", "epochs=12", *QUICK, "--limit", "120", "--out", str(out)]
    command = [sys.executable, "-u", "-m", "patchcleanser", *words]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env={**os.environ, "PYTHONUNBUFFERED": "1"})
    assert process.stderr is not None
    deadline = time.monotonic() + 200
    while not (out / "checkpoint.pt").exists() and time.monotonic() < deadline:
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, error = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "goes on from what was kept:" in error
    assert "patchcleanser train --model net:tiny" in error
    done = as_process(*words)
    assert done.returncode == 0, done.stderr
    assert "going on from the checkpoint" in done.stderr
    assert "12/12" in done.stderr
    assert " 1/12" not in done.stderr  # it did not start from the beginning


@pytest.mark.slow
def test_two_processes_train_together_and_one_of_them_writes(tmp_path: Path) -> None:
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--cpu", "--num_processes", "2"]
    words = ["train", "--model", "net:tiny", "--set", "epochs=2", *QUICK, "--out", str(tmp_path / "run")]
    command = [*launch, "-m", "patchcleanser", *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("wrote") == 1
    assert load_classifier(f"trained:{tmp_path / 'run'}", device="cpu").classes == 10
