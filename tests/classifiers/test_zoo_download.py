"""The zoo from an installed wheel: cards are in the package, weights come from the address that the user names."""

from __future__ import annotations

import hashlib
import json
import shutil
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from patchcleanser import load_classifier
from patchcleanser.classifiers import trained
from patchcleanser.errors import ClassifierError
from patchcleanser.records.cache import checksum

TINY = trained.PACKAGED / "tiny"


class Release:
    """Files of a release on a local HTTP server, and what was requested of them."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.requests: list[str] = []
        self.cut = False
        release = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                release.requests.append(self.path)
                content = release.files.get(self.path)
                self.send_response(404 if content is None else 200)
                self.send_header("Content-Length", str(len(content or b"")))
                self.end_headers()
                self.wfile.write((content or b"")[: 1000 if release.cut else None])

            def log_message(self, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}/v1"


@pytest.fixture
def release() -> Iterator[Release]:
    release = Release()
    threading.Thread(target=release.server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    yield release
    release.server.shutdown()
    release.server.server_close()


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, release: Release) -> Path:
    """The cache of a user who installed a wheel: a card in the package, no weights, no checkout."""
    package = tmp_path / "package"
    (package / "remote").mkdir(parents=True)
    shutil.copyfile(TINY / "card.json", package / "remote" / "card.json")
    monkeypatch.setattr(trained, "PACKAGED", package)
    monkeypatch.setattr(trained, "CHECKOUT", tmp_path / "nowhere")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATCHCLEANSER_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PATCHCLEANSER_ZOO_URL", release.url)
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    return tmp_path / "cache" / "zoo"


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.rglob("*") if path.is_file())


def test_weights_are_fetched_once(cache: Path, release: Release) -> None:
    release.files["/v1/remote.safetensors"] = (TINY / "model.safetensors").read_bytes()
    fetched = load_classifier("zoo:remote", device="cpu")
    assert load_classifier("zoo:remote", device="cpu").fingerprint == fetched.fingerprint
    assert release.requests == ["/v1/remote.safetensors"]
    assert files(cache) == ["remote.safetensors"]


def test_a_damaged_file_in_the_cache_is_replaced(cache: Path, release: Release) -> None:
    release.files["/v1/remote.safetensors"] = (TINY / "model.safetensors").read_bytes()
    cache.mkdir(parents=True)
    (cache / "remote.safetensors").write_bytes(b"half of it")
    load_classifier("zoo:remote", device="cpu")
    assert checksum(cache / "remote.safetensors") == trained.read_card(TINY)["weights_sha256"]


def test_another_file_is_not_used(cache: Path, release: Release) -> None:
    content = b"weights of somebody else"
    release.files["/v1/remote.safetensors"] = content
    with pytest.raises(ClassifierError, match=rf"has sha256 {hashlib.sha256(content).hexdigest()[:12]}…, expected"):
        load_classifier("zoo:remote", device="cpu")
    assert files(cache) == []


def test_an_interrupted_download_is_not_used_and_the_next_one_works(cache: Path, release: Release) -> None:
    release.files["/v1/remote.safetensors"] = (TINY / "model.safetensors").read_bytes()
    release.cut = True
    with pytest.raises(ClassifierError, match=r"no weights for zoo:remote: .*incomplete"):
        load_classifier("zoo:remote", device="cpu")
    assert files(cache) == []
    release.cut = False
    load_classifier("zoo:remote", device="cpu")


def test_a_missing_file_is_one_sentence_with_the_command_that_fetches_it(cache: Path, release: Release) -> None:
    command = f"curl -fL --create-dirs -o {cache}/remote.safetensors {release.url}/remote.safetensors"
    with pytest.raises(ClassifierError, match=r"zoo:remote: cannot fetch .* \(HTTP Error 404: Not Found\)") as caught:
        load_classifier("zoo:remote", device="cpu")
    assert command in str(caught.value)
    assert files(cache) == []


@pytest.mark.parametrize("url", ["http://127.0.0.1:9", "http://no-such-host.invalid", "not an address"])
def test_an_address_that_cannot_be_reached_is_named(url: str, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATCHCLEANSER_ZOO_URL", url)
    with pytest.raises(ClassifierError, match=f"no weights for zoo:remote: cannot fetch {url}/remote.safetensors"):
        load_classifier("mirror:zoo:remote", device="cpu")


def test_without_an_address_the_error_says_what_to_set(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PATCHCLEANSER_ZOO_URL")
    with pytest.raises(ClassifierError, match=r"not in the package; set PATCHCLEANSER_ZOO_URL .*remote\.safetensors"):
        load_classifier("zoo:remote", device="cpu")


def test_weights_that_are_here_win_over_a_card_in_the_package(cache: Path, release: Release, tmp_path: Path) -> None:
    shutil.copytree(TINY, tmp_path / "zoo" / "remote")
    load_classifier("zoo:remote", device="cpu")
    assert release.requests == []


def test_every_zoo_model_has_the_hash_of_its_weights_and_its_card_is_packaged() -> None:
    package = (trained.CHECKOUT.parent / "pyproject.toml").read_text()
    for weights in trained.CHECKOUT.glob("*/model.safetensors"):
        assert trained.read_card(weights.parent)["weights_sha256"] == checksum(weights)
        card = f"zoo/{weights.parent.name}/card.json"
        assert f'"{card}" = "patchcleanser/{card}"' in package


def test_only_cards_of_the_package_are_downloaded_for(cache: Path, release: Release, tmp_path: Path) -> None:
    (tmp_path / "zoo" / "stranger").mkdir(parents=True)
    (tmp_path / "zoo" / "stranger" / "card.json").write_text(
        json.dumps(trained.read_card(TINY) | {"weights_sha256": hashlib.sha256(b"x").hexdigest()})
    )
    with pytest.raises(ClassifierError, match=r"no weight file at .*stranger"):
        load_classifier("zoo:stranger", device="cpu")
    assert release.requests == []
