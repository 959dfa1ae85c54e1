"""Commands that list and describe: masks, models, data and the demo."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from PIL import Image
from torch import nn

from patchcleanser.records.run import Run

from .conftest import Command


def test_masks_prints_the_proof_and_draws(run: Command) -> None:
    done = run("masks", "--patch", "5", "--image", "32", "--png", "masks.png")
    assert "36 masks" in done.out
    assert "covering: proved. Each of the 784 placements" in done.out
    with Image.open("masks.png") as picture:
        assert picture.size[0] > 100
    facts = json.loads(run("masks", "--patch", "2%", "--patches", "2", "--masks", "3", "--json").out)
    assert facts["certify_classifications"] == 255
    assert run("masks", "--patch", "40", "--image", "32").code == 2
    upright = run("masks", "--image", "1920x1080")
    assert "on an image of 1920 high × 1080 wide px" in upright.out
    assert "note: --image 1920x1080 is upright; for a picture that is wider than high write 1080x1920" in upright.err
    assert run("masks", "--image", "1080x1920").err == ""
    assert "too many to draw" in run("masks", "--patches", "2", "--png", "many.png").err


def test_models_lists_the_zoo_and_describes_one(run: Command) -> None:
    assert "zoo:tiny" in run("models").out
    text = run("models", "zoo:tiny").out
    assert "preprocessing  resize 32x32, bicubic; mean 0.4914,0.4822,0.4465; std 0.247,0.2435,0.2616\n" in text
    assert "of 224×224 px gives 10 scores" in text
    facts = json.loads(run("models", "zoo:tiny", "--json").out)
    assert facts["classes"] == 10
    assert facts["names"][3] == "cat"
    assert len(facts["fingerprint"]) == 64


def test_data_lists_what_is_known(run: Command) -> None:
    assert "imagenette" in run("data").out
    assert json.loads(run("data", "sample", "--json").out)["images"] == 300


def test_the_demo_certifies_attacks_and_reports_offline(run: Command) -> None:
    done = run("demo", "--limit", "12", "--device", "cpu")
    assert done.code == 0, done.err
    assert len(Run.open("demo/run").read()) == 12
    assert "makes the undefended classifier say" in done.out
    assert "the report: demo/report/report.html" in done.out
    with Image.open("demo/attack.png") as picture:
        assert picture.width > 3 * 256
    page = Path("demo/report/report.html").read_text(encoding="utf-8")
    assert "<h3>Recovered" in page  # an attacked image is shown recovered, with its labels before and after
    assert len(Run.open("demo/attack").read()) == 8
    again = json.loads(run("demo", "--limit", "12", "--device", "cpu", "--json").out)
    assert again["attack"]["defended"] == again["attack"]["true"] != again["attack"]["undefended"]
    assert Path(again["report"]).is_file()


def test_a_thousand_names_of_classes_are_not_printed(run: Command) -> None:
    text = run("models", "torchvision:squeezenet1_1?weights=none", "--device", "cpu").out
    assert "names          tench, goldfish, great white shark, tiger shark, hammerhead, … (1,000 in all)\n" in text
    assert "resize 256 px for the short side, bilinear; crop 224x224; mean 0.485,0.456,0.406;" in text


NETWORKS = """
from torch import nn
def maps(): return nn.Conv2d(3, 10, 3).eval()
def small(): return nn.Sequential(nn.Flatten(), nn.Linear(3 * 32 * 32, 7)).eval()
"""


def test_models_classifies_a_picture_and_refuses_what_certify_would(run: Command, tmp_path: Path) -> None:
    (tmp_path / "own_networks.py").write_text(NETWORKS)
    done = run("models", "python:own_networks.py:small", "--device", "cpu")
    assert (done.code, done.err) == (0, "")
    assert "classes        7\n" in done.out
    assert "preprocessing  none: pixels from 0 to 1, as they are\n" in done.out
    assert "of 32×32 px gives 7 scores" in done.out
    done = run("models", "python:own_networks.py:maps", "--device", "cpu")
    assert done.code == 2
    assert (
        "cannot classify a picture: the classifier must return logits [1, classes], got (1, 10, 222, 222)" in done.err
    )
    assert "problem" not in done.out


def test_models_says_which_size_an_onnx_file_takes(run: Command, tmp_path: Path) -> None:
    module = nn.Sequential(nn.Flatten(), nn.Linear(3 * 24 * 32, 7)).eval()
    torch.onnx.export(module, (torch.rand(1, 3, 24, 32),), tmp_path / "own.onnx", dynamo=True, verbose=False)
    done = run("models", "onnx:own.onnx")
    assert "takes          24×32 px only; for others add ?resize=24x32\n" in done.out
    done = run("models", "onnx:own.onnx?resize=24x32")
    assert "takes" not in done.out
    assert "gives 7 scores" in done.out
