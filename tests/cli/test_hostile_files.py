"""Runs, cards and links from somebody else: a command says one sentence, and nothing of theirs runs or is fetched."""

from __future__ import annotations

import json
import os
import shutil
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import save_file

from patchcleanser import Job, Threat, evaluate, load_classifier, load_dataset
from patchcleanser.data import chosen
from patchcleanser.networks.builders import build_network
from patchcleanser.records.run import Run

from .conftest import Command, Done

EVIL = """
from pathlib import Path
Path("canary").write_text("code of a stranger ran")
def make(**options):
    from patchcleanser.networks.builders import build_network
    return build_network("tiny", {}).eval()
"""
PREPROCESSING = {"resize": [32, 32], "mean": [0.5, 0.5, 0.5], "std": [0.25, 0.25, 0.25]}


@pytest.fixture(scope="module")
def honest(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of two images."""
    job = Job(load_classifier("zoo:tiny", device="cpu"), chosen(load_dataset("sample"), 2), Threat.square(5), masks=2)
    return evaluate(
        job, tmp_path_factory.mktemp("runs") / "run", metadata={"model": "zoo:tiny", "data": "sample"}
    ).folder


@pytest.fixture
def place(run: Command, tmp_path: Path, honest: Path) -> Iterator[Path]:
    """The current folder, with a stranger's code, model and run in it."""
    (tmp_path / "evil.py").write_text(EVIL)
    shutil.copytree(honest, tmp_path / "run")
    for folder in ("card", "zoo/evil"):
        write_card(tmp_path / folder, "python:evil:make")
    yield tmp_path
    sys.modules.pop("evil", None)


def write_card(folder: Path, model: Any, **more: Any) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    save_file(build_network("tiny", {}).state_dict(), folder / "model.safetensors")
    (folder / "card.json").write_text(json.dumps({"model": model, "preprocessing": PREPROCESSING, **more}))


def say(folder: Path, **metadata: Any) -> None:
    """Change what the manifest of a run says besides its job."""
    path = folder / "run" / "manifest.json"
    manifest = json.loads(path.read_text())
    manifest["about"] |= metadata
    path.write_text(json.dumps(manifest))


def require_refused(done: Done, folder: Path, *words: str) -> None:
    assert done.code == 2, done.err
    assert done.out == ""
    assert done.err.startswith("error: ")
    assert done.err.count("\n") == 1
    for word in words:
        assert word in done.err
    assert not (folder / "canary").exists()
    assert "evil" not in sys.modules


SPECS = [
    "python:evil:make",
    "python:evil.py:make",
    "inpaint:python:evil:make",
    "mirror:inpaint:python:evil:make",
    "tokens:python:evil:make",
    "mean:zoo:tiny,mirror:python:evil:make",
    "trained:card",
    "inpaint:trained:card",
    "zoo:evil",
    "python:patchcleanser.cli.app:main",
    "python:patchcleanser.experiments.imagenet:file_preprocessing",
]


@pytest.mark.parametrize("spec", SPECS)
def test_audit_runs_no_code_that_a_manifest_or_a_card_names(spec: str, run: Command, place: Path) -> None:
    say(place, model=spec)
    require_refused(run("audit", "run"), place, "names 'python:", "runs code", "--trust-code", "trust_code=True")


def test_audit_runs_it_when_it_is_told_to_trust(run: Command, place: Path) -> None:
    say(place, model="trained:card")
    done = run("audit", "run", "--trust-code")
    assert (place / "canary").exists()  # so the tests above would have seen it
    assert "made with another model" in done.err


def test_a_spec_that_the_user_types_himself_is_trusted(run: Command, place: Path) -> None:
    run("audit", "run", "--model", "python:evil:make")
    assert (place / "canary").exists()


def test_an_honest_run_needs_no_flag(run: Command, place: Path) -> None:
    done = run("audit", "run", "--sample", "1", "--attack", "0")
    assert done.code == 0, done.err


def test_our_own_builder_needs_no_flag_and_leaves_the_import_path_alone(
    run: Command, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATCHCLEANSER_MODELS", str(place))
    write_card(place / "own", "python:patchcleanser.experiments.imagenet:resnet50_at_32?classes=10")
    before = [*sys.path]
    require_refused(run("models", "trained:own"), place, "no resnet50_v1_imagenet.safetensors in")
    assert sys.path == before  # or a stranger's torch.py in this folder could be imported next


def test_audit_fetches_no_repository_that_a_manifest_names(run: Command, place: Path) -> None:
    say(place, model="transformers:stranger/model")
    require_refused(run("audit", "run"), place, "fetched from the hub", "--trust-code")


@pytest.fixture
def server() -> Iterator[socket.socket]:
    """Somebody who listens, to see who comes."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        listening.setblocking(False)
        yield listening


@pytest.mark.parametrize(
    "address",
    [
        "http://{host}/a.parquet",
        "simplecache::http://{host}/a.parquet",
        "zip://a.parquet::http://{host}/a.zip",
        "file:///x::http://{host}/a.parquet",
        "reference://::http://{host}/a.json",
        "s3://bucket/a.parquet",
        "memory://a.parquet",
        "data:,x",
        "//{host}/share/a.parquet",
    ],
)
def test_audit_fetches_no_data_from_an_address_that_a_manifest_names(
    address: str, run: Command, place: Path, server: socket.socket
) -> None:
    say(place, data="parquet:" + address.format(host="{}:{}".format(*server.getsockname())))
    require_refused(run("audit", "run"), place, "is an address elsewhere", "--trust-code")
    with pytest.raises(BlockingIOError):
        server.accept()


@pytest.mark.parametrize(("name", "value"), [("model", 5), ("model", ["zoo:tiny"]), ("data", {"a": 1}), ("data", None)])
def test_a_manifest_whose_names_are_no_names_is_damaged(name: str, value: Any, run: Command, place: Path) -> None:
    say(place, **{name: value})
    require_refused(run("audit", "run"), place, f"its {name} is not a name; name it with --{name}")


@pytest.mark.parametrize(
    "words",
    [
        ["certify", "--limit", "2"],
        ["attack", "--limit", "2"],
        ["predict", "evil.py"],
        ["serve", "--port", "0"],
        ["models"],
        ["train", "--data", "sample", "--out", "out"],
        ["harden", "--images", "sample", "--out", "out"],
        [
            "train",
            "--model",
            "net:tiny",
            "--data",
            "sample",
            "--set",
            "teacher_weight=0.5",
            "--out",
            "out",
            "--teacher",
        ],
        ["reproduce", "table2", "--data", "cifar10", "--models"],
    ],
    ids=lambda words: f"{words[0]} {words[-1].removeprefix('--')}",
)
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # serve ends with its port open
def test_no_command_runs_the_code_that_a_card_names(words: list[str], run: Command, place: Path) -> None:
    if words[0] != "models" and words[-1] not in ("--teacher", "--models"):
        words = [*words, "--model"]
    require_refused(run(*words, "trained:card"), place, "card.json names 'python:evil:make'", "--trust-code")


def test_a_card_of_ones_own_code_says_how_it_is_loaded(run: Command, place: Path) -> None:
    small = ("--data", "sample", "--limit", "20", "--set", "epochs=1", "--set", "batch=10", "--set", "holdout=0")
    (place / "mine.py").write_text(
        "from patchcleanser import Preprocessing, TorchClassifier\n"
        "from patchcleanser.networks.builders import build_network\n"
        "def make(): return TorchClassifier(build_network('tiny', {}).eval(), Preprocessing((32, 32)), classes=10)\n"
    )
    done = run("train", "--model", "python:mine:make", *small, "--device", "cpu", "--out", "out")
    assert done.code == 0, done.err
    assert "use it as trained:out with --trust-code" in done.out
    assert run("models", "trained:out").code == 2
    assert run("models", "trained:out", "--trust-code").code == 0


@pytest.mark.parametrize(
    ("words", "link"),
    [
        (["audit", "run", "--sample", "1", "--attack", "0"], "audit"),
        (["report", "run"], "report"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_nothing_is_written_through_a_link_in_a_run(words: list[str], link: str, run: Command, place: Path) -> None:
    (place / "home").mkdir()
    (place / "run" / link).symlink_to(place / "home")
    require_refused(run(*words), place, "is a link that leads to", "outside of run")
    assert list((place / "home").iterdir()) == []


def test_a_lock_that_is_a_link_does_not_touch_what_it_leads_to(place: Path) -> None:
    secret = place / "secret"
    secret.write_text("keep me")
    (place / "run" / "lock").unlink(missing_ok=True)
    (place / "run" / "lock").symlink_to(secret)
    with pytest.raises(Exception, match="is a symbolic link"), Run.open(place / "run").locked():
        pass
    assert secret.read_text() == "keep me"


CARDS: dict[str, Any] = {
    "a list": [],
    "a text": "net:tiny",
    "a preprocessing that is no mapping": {"model": "net:tiny", "preprocessing": 5},
    "an unknown setting": {"model": "net:tiny", "preprocessing": {"evil": 1}},
    "a mean of texts": {"model": "net:tiny", "preprocessing": {"mean": ["a"], "std": ["b"]}},
    "classes that are a number": {"model": "net:tiny", "preprocessing": PREPROCESSING, "classes": 5},
}


@pytest.mark.parametrize("card", CARDS)
def test_a_malformed_card_is_one_sentence(card: str, run: Command, place: Path) -> None:
    (place / "card" / "card.json").write_text(json.dumps(CARDS[card]))
    require_refused(run("models", "trained:card"), place, "card.json is not a model card")


def test_a_card_that_is_no_text_or_no_end_is_one_sentence(run: Command, place: Path) -> None:
    path = place / "card" / "card.json"
    for content in (b"\xff\xfe\x00", b"[" * 100_000):
        path.write_bytes(content)
        require_refused(run("models", "trained:card"), place, "is not a model card")
    path.unlink()
    path.symlink_to("/dev/zero")  # reading it would never end
    require_refused(run("models", "trained:card"), place, "it has no card.json")
    path.unlink()
    os.mkfifo(path)
    require_refused(run("models", "trained:card"), place, "it has no card.json")


def test_a_spec_that_never_ends_is_one_sentence(run: Command, place: Path) -> None:
    write_card(place / "card", "mirror:" * 5000 + "net:tiny")
    require_refused(run("models", "trained:card"), place, "nested too deeply")


@pytest.mark.parametrize("spec", ["trained:../card", "zoo:tiny", "onnx:/tmp/model.onnx", "transformers:card"])
def test_a_card_leads_to_no_other_folder(spec: str, run: Command, place: Path) -> None:
    write_card(place / "card", spec)
    done = run("models", "trained:card")
    assert done.code == 2
    assert done.err.count("\n") == 1


def test_a_card_reads_no_weights_but_those_beside_it(run: Command, place: Path) -> None:
    os.mkfifo(place / "elsewhere.pth")  # whoever opens it waits for ever
    write_card(place / "card", f"net:tiny?weights={place}/elsewhere.pth")
    assert run("models", "trained:card").code == 0


def test_links_in_a_folder_of_images_lead_to_no_hang(run: Command, place: Path) -> None:
    (place / "photos").mkdir()
    (place / "photos" / "1.png").symlink_to("/dev/zero")
    os.mkfifo(place / "photos" / "2.png")
    (place / "photos" / "3.png").symlink_to(place / "evil.py")
    (place / "photos" / "up").symlink_to(place)
    done = run("data", "folder:photos")
    assert done.code == 2
    for name in ("1.png", "2.png", "3.png"):
        assert name in done.out
