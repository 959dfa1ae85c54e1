"""What trains on a GPU machine that is lent for half an hour: packs of images, calls, and tables of commands."""

from __future__ import annotations

import os
import runpy
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import typer
from PIL import Image
from torch import nn

from patchcleanser.classifiers.trained import read_card
from patchcleanser.cli.app import app
from patchcleanser.data import load_dataset
from patchcleanser.data.codec import as_picture
from patchcleanser.data.multilabel_sets import load_multilabel
from patchcleanser.paper import EXPERIMENTS
from patchcleanser.paper.models import PAPER_MODELS
from patchcleanser.training import RECIPES

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
GPU = BENCHMARKS / "gpu"
TABLES = sorted(GPU.glob("*.txt"))


def script(monkeypatch: pytest.MonkeyPatch, path: Path, *words: object) -> None:
    monkeypatch.syspath_prepend(str(path.parent))
    monkeypatch.setattr(sys, "argv", [path.name, *map(str, words)])
    runpy.run_path(str(path), run_name="__main__")


def commands(table: Path) -> list[list[str]]:
    """The commands of a table: what to do, the model, and options; without those that start another script."""
    lines = [line for line in table.read_text().splitlines() if line and not line.startswith("#")]
    steps = [shlex.split(step) for line in lines for step in line.split(" && ")]
    return [words for words in steps if words[0] != "baselines"]


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.stem)
def test_the_commands_of_a_table_exist_with_these_options(table: Path) -> None:
    group = typer.main.get_command(app)
    for name, _, *words in commands(table):
        command = group.commands[name]  # type: ignore[attr-defined]
        context = command.make_context(name, [*([] if name == "price" else ["--out", "run"]), *words])
        assert not context.args
        if name == "reproduce":
            assert set(context.params["names"]) <= EXPERIMENTS.keys()
        if name == "train":
            settings = dict(setting.split("=", 1) for setting in context.params["change"])
            RECIPES[context.params["recipe"]].changed(settings)  # a wrong name or number is an error


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.stem)
def test_what_a_line_measures_was_made_by_it_or_by_a_line_before(table: Path) -> None:
    names: set[str] = set()
    for kind, name, *_ in commands(table):
        assert (kind in ("certify", "price", "reproduce")) == (name in names), name
        assert kind != "reproduce" or name in PAPER_MODELS
        names.add(name)


def photos(folder: Path, *numbers: int) -> Path:
    (folder / "cat").mkdir(parents=True)
    for number in numbers:
        as_picture(load_dataset("sample").image(number)).resize((96, 64)).save(folder / "cat" / f"{number}.png")
    return folder


def test_a_pack_has_no_test_image_nor_one_that_looks_like_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train, test = photos(tmp_path / "train", 0, 1, 2, 3, 4), photos(tmp_path / "test", 0)
    mirrored = Image.open(train / "cat" / "0.png").transpose(Image.Transpose.FLIP_LEFT_RIGHT).resize((80, 80))
    mirrored.save(train / "cat" / "alike.jpg", quality=60)
    words = [f"folder:{train}", "--without", "4.png", "--apart", f"folder:{test}", "--out", tmp_path / "a.parquet"]
    script(monkeypatch, BENCHMARKS / "pack.py", *words)
    packed = load_dataset(f"parquet:{tmp_path / 'a-0.parquet'}")
    assert [packed.id(index).rpartition("/")[2] for index in range(len(packed))] == ["1.png", "2.png", "3.png"]
    assert packed.classes == ("cat",)
    assert packed.content(0) == (train / "cat" / "1.png").read_bytes()


def test_packs_of_several_parts_hold_the_same_pixels_and_labels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sample = load_dataset("sample")
    words = ["sample", "--webp", "100", "--part", "0.1", "--out", tmp_path / "packs" / "data" / "b.parquet"]
    script(monkeypatch, BENCHMARKS / "pack.py", *words)
    packed = load_dataset(f"parquet:{tmp_path / 'packs' / 'data'}")
    assert sample.labels is not None
    assert packed.labels is not None
    assert np.array_equal(packed.labels, sample.labels)
    assert all(torch.equal(packed.image(n), sample.image(n)) for n in range(0, 300, 7))
    script(monkeypatch, GPU / "carry.py", tmp_path / "packs", "data", "--mib", "0.25", "--out", tmp_path / "carry")
    calls = sorted((tmp_path / "carry").iterdir())
    sizes = [sum(file.stat().st_size for file in call.rglob("*.parquet")) for call in calls]
    assert len(calls) > 1
    assert max(sizes) <= 0.25 * 2**20
    assert sum(sizes) == sum(file.stat().st_size for file in (tmp_path / "packs").rglob("*.parquet"))


def test_packs_of_several_labels_share_out_the_images_and_their_lists(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pictures, boxes = photos(tmp_path / "images", *range(7)) / "cat", tmp_path / "labels" / "cat"
    boxes.mkdir(parents=True)
    lines = {"0": "0 .5 .5 .2 .2\n16 .5 .5 .2 .2", "1": "16 .5 .5 .2 .2", "2": "0 .5 .5 .2 .2", "3": "0 .5 .5 .2 .2"}
    for number, text in lines.items():
        (boxes / f"{number}.txt").write_text(text)
    whole = load_multilabel(f"yolo:{pictures}")
    for name, words in {"train": ["--limit", "4"], "test": ["--skip", "4"], "some": ["--labelled"]}.items():
        words = [f"yolo:{pictures}", "--shuffle", "0", *words, "--out", str(tmp_path / f"{name}.parquet")]
        script(monkeypatch, BENCHMARKS / "pack.py", *words)
    train, test, some = (load_multilabel(f"parquet:{tmp_path}/{name}-0.parquet") for name in ("train", "test", "some"))
    shown = {whole.id(n): row.tolist() for n, row in enumerate(whole.targets)}
    packed = {
        part.id(n).rpartition(":")[2]: part.targets[n].tolist() for part in (train, test) for n in range(len(part))
    }
    assert (len(train), len(test), len(some), packed) == (4, 3, 4, shown)
    assert train.classes == test.classes == ("dog", "person")


def test_a_network_with_its_batch_statistics_put_back_answers_as_before() -> None:
    torch.manual_seed(0)
    first, second = (nn.Conv2d(*channels, 3, bias=False) for channels in ((3, 4), (4, 5)))
    network = nn.Sequential(first, nn.BatchNorm2d(4), nn.ReLU(), second, nn.BatchNorm2d(5)).eval()
    nn.init.normal_(network[1].bias)
    batches = list(torch.rand(4, 2, 3, 9, 9))
    before = network(batches[0])
    runpy.run_path(str(GPU / "starts.py"))["unfold"](network, batches)
    assert torch.allclose(network(batches[0]), before, atol=1e-4)
    assert torch.allclose(network[3].weight.flatten(1).norm(dim=1), torch.tensor(1.5))
    normed = network.train()(torch.cat(batches))  # batch statistics answer alike, as the running ones of all of them
    assert torch.allclose(normed, network.eval()(torch.cat(batches)), atol=1e-2)


LINES = """# the first ends soon, the second does not
train short --model net:tiny --data sample --limit 40 --set batch=20 --set epochs=1 --device cpu && certify short \
--data sample --limit 2 --patch 5 --masks 2 --device cpu
train long --model net:tiny --data sample --limit 100 --set batch=20 --set epochs=50 --device cpu
"""


def call(tree: Path, work: Path, out: Path, seconds: int) -> None:
    """One call on a machine, whose results are unpacked where the next call carries them from."""
    out.mkdir()
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = {**os.environ, "WORK": str(work), "OUT": str(out), "PATH": path, "CHECKPOINTS": "1"}
    command = ["bash", str(GPU / "call.sh"), str(tree / "table.txt"), str(seconds)]
    subprocess.run(command, cwd=tree, env=environment, check=True, stdout=subprocess.DEVNULL)
    (tree / "runs/carry-back/1").mkdir(parents=True, exist_ok=True)
    for first in out.glob("*.tar.00"):
        parts = b"".join(part.read_bytes() for part in sorted(out.glob(f"{first.stem}.*")))
        subprocess.run(["tar", "-x", "-C", tree / "runs/carry-back/1"], input=parts, check=True)


@pytest.mark.slow
def test_calls_go_on_from_what_came_back_from_a_machine_that_was_lost(tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    tree.mkdir()
    for name in ("src", "benchmarks"):
        (tree / name).symlink_to(BENCHMARKS.parent / name)
    (tree / "table.txt").write_text(LINES.replace("\\\n", ""))
    carried, number = tree / "runs/carry-back/1", 0
    while not (carried / "models/short/model.safetensors").is_file() or not (carried / "models/long").is_dir():
        assert number < 20
        call(tree, tmp_path / "first", tmp_path / f"out{number}", 5)
        number += 1
    holders = subprocess.run(["pgrep", "-f", str(tree / "table.txt")], capture_output=True, check=True).stdout.split()
    for process in map(int, holders):
        if os.getpgid(process) == process:
            os.killpg(process, signal.SIGKILL)
    made = (carried / "models/short/model.safetensors").stat().st_mtime
    call(tree, tmp_path / "second", tmp_path / "last", 300)
    assert "going on from the checkpoint" in (carried / "logs/long.log").read_text()
    assert read_card(carried / "models/long")["recipe"]["epochs"] == 50
    assert (carried / "logs/short.log").read_text().count("wrote models/short") == 1
    assert (carried / "models/short/model.safetensors").stat().st_mtime == made  # not sent again
    assert len(list((tmp_path / "last").iterdir())) <= 8
