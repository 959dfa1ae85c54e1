"""A real server in a process of its own: load, clients that leave, and the end."""

from __future__ import annotations

import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from patchcleanser import Client, DoubleMasking, Threat, load_classifier, load_dataset
from patchcleanser.cli.serve import _listen
from patchcleanser.errors import DataError, InputError, ServiceError


@pytest.fixture(scope="module")
def expected() -> list[Any]:
    """What the library says of the first samples."""
    sample = load_dataset("sample")
    defense = DoubleMasking(load_classifier("zoo:tiny", device="cpu"), Threat.share(0.02))
    return defense.predict([sample.image(i) for i in range(8)])


def wait_for(true: Callable[[], bool], what: str) -> None:
    for _ in range(1500):
        if true():
            return
        time.sleep(0.02)
    raise AssertionError(what)


def queued(server: Any) -> float:
    """Images that wait at the server."""
    text = httpx.get(f"{server.address}/metrics").text
    return float(text.split("\npatchcleanser_queue_images ")[1].split()[0])


def test_the_client_gets_what_the_library_says(tiny_server: Any, expected: list[Any]) -> None:
    sample = load_dataset("sample")
    with Client(tiny_server.address) as client:
        assert client.ready()
        predictions = client.predict([sample.image(i) for i in range(8)])
        assert [(f.label, f.case, f.classifications) for f in predictions] == [
            (v.label, v.case.value, v.classifications) for v in expected
        ]
        (certificate,) = client.certify([sample.image(2)], [int(sample.labels[2])], maps=True)
        assert certificate.certified
        assert certificate.maps[0].rows == ["1" * 28] * 28
        model = client.model()
        assert (model.model, model.classes, model.threat) == ("zoo:tiny", 10, "2% patch")
        assert client.masks(224, 224).certify_classifications == 666


def test_the_client_takes_bytes_paths_and_pictures_alike(tiny_server: Any, tmp_path: Path) -> None:
    from patchcleanser.data.codec import as_picture

    sample = load_dataset("sample")
    picture = as_picture(sample.image(1))
    picture.save(tmp_path / "x.png")
    with Client(tiny_server.address) as client:
        kinds = [
            (tmp_path / "x.png").read_bytes(),
            tmp_path / "x.png",
            str(tmp_path / "x.png"),
            picture,
            sample.image(1),
        ]
        predictions = client.predict([*kinds, sample.image(1).numpy()], masks=2)
        assert len({str(f) for f in predictions}) == 1
        with pytest.raises(InputError, match="at least 1 image"):
            client.predict([])
        with pytest.raises(InputError, match="come as a list"):
            client.predict(tmp_path / "x.png")
        with pytest.raises(DataError, match="cannot read"):
            client.predict([tmp_path / "nothing.png"])


def test_troubles_reach_the_client_with_their_code(tiny_server: Any) -> None:
    with Client(tiny_server.address) as client:
        with pytest.raises(ServiceError, match="none of BMP") as caught:
            client.predict([b"junk"])
        assert (caught.value.code, caught.value.status) == ("unsupported-media", 415)
        request_id = caught.value.request_id
        wait_for(lambda: any(line.get("request_id") == request_id for line in tiny_server.lines()), "the log names it")
    with Client("http://127.0.0.1:1", retries=0) as nobody:
        assert not nobody.ready()
        with pytest.raises(ServiceError, match="no answer from") as caught:
            nobody.model()
        assert caught.value.code == "unreachable"


@pytest.mark.parametrize("status", [429, 503])
def test_the_client_comes_back_when_it_is_told_to(status: int) -> None:
    times: list[float] = []

    def busy_once(request: httpx.Request) -> httpx.Response:
        times.append(time.monotonic())
        if len(times) == 1:
            return httpx.Response(status, headers={"retry-after": "1"})
        return httpx.Response(200, json={"request_id": "x", "predictions": [], "milliseconds": 1})

    with Client(transport=httpx.MockTransport(busy_once)) as client:
        assert client.predict([b"x"]) == []
    assert times[1] - times[0] >= 1
    broken = Client(transport=httpx.MockTransport(lambda _: httpx.Response(502)), retries=0)
    with broken, pytest.raises(ServiceError, match="HTTP 502"):
        broken.model()


@pytest.mark.parametrize("when", ["Wed, 21 Oct 2026 07:28:00 GMT", "-5", ""])
def test_the_client_understands_proxies_that_say_when_in_other_words(when: str) -> None:
    def busy(request: httpx.Request) -> httpx.Response:
        return httpx.Response(503, headers={"retry-after": when})

    with (
        Client(transport=httpx.MockTransport(busy), retries=1) as client,
        pytest.raises(ServiceError, match="HTTP 503"),
    ):
        client.model()


def test_an_answer_of_another_server_is_said_to_be_none() -> None:
    login = httpx.MockTransport(lambda _: httpx.Response(200, text="<html>log in"))
    with Client(transport=login) as client, pytest.raises(ServiceError, match="not one of patchcleanser's"):
        client.model()
    with pytest.raises(InputError, match=r"begins with http:// or https://, got 'localhost:8000'"):
        Client("localhost:8000")


def test_who_promises_much_and_sends_nothing_keeps_nobody_out(tiny_server: Any, kit: Any) -> None:
    where = httpx.URL(tiny_server.address)
    facts = (
        b"POST /v1/predict HTTP/1.1",
        b"Host: localhost",
        b"Content-Type: application/json",
        b"Content-Length: 33554432",
    )
    with ExitStack() as open_ones:
        for _ in range(20):
            slow = open_ones.enter_context(socket.create_connection((where.host, where.port or 80)))
            slow.sendall(b"\r\n".join(facts) + b"\r\n\r\n{")
        answer = httpx.post(f"{tiny_server.address}/v1/predict", files=kit.upload(kit.png()), timeout=60)
        assert answer.status_code == 200


def test_the_work_of_a_client_that_leaves_is_dropped(tiny_server: Any, kit: Any) -> None:
    files = kit.upload(*(kit.png(seed=n, size=(64, 64)) for n in range(16)))
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{tiny_server.address}/v1/predict", files=files, timeout=httpx.Timeout(30, read=0.3))
    wait_for(
        lambda: any(line.get("status") == 499 for line in tiny_server.lines()), "the log says that the client left"
    )
    wait_for(lambda: queued(tiny_server) == 0, "the queue is empty")
    assert httpx.post(f"{tiny_server.address}/v1/predict", files=kit.upload(kit.png())).status_code == 200


def test_sigterm_under_load_answers_every_accepted_request(kit: Any, tmp_path: Path, expected: list[Any]) -> None:
    sample = load_dataset("sample")
    contents = [sample.content(i) for i in range(8)]
    number, each = 16, 3
    answers: dict[int, Any] = {}
    http = httpx.Client(timeout=120, limits=httpx.Limits(max_connections=number))

    def ask(at: int) -> None:
        files = kit.upload(*(contents[(at + k) % 8] for k in range(each)))
        answers[at] = http.post(f"{server.address}/v1/predict", files=files)

    with kit.start(tmp_path / "log") as server, http, ThreadPoolExecutor(number) as pool:
        asking = [pool.submit(ask, at) for at in range(number)]
        wait_for(lambda: each * len(answers) + queued(server) >= number * each, "all requests are in")
        assert len(answers) < number, "the signal must find requests that wait"
        assert server.stop() == 0
        for future in asking:
            future.result(60)
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{server.address}/healthz")
    assert sorted(answers) == list(range(number))
    for at, answer in answers.items():
        assert answer.status_code == 200
        labels = [prediction["label"] for prediction in answer.json()["predictions"]]
        assert labels == [expected[(at + k) % 8].label for k in range(each)]
    assert server.lines()[-1]["event"].startswith("Finished server process")


@pytest.mark.slow
def test_samples_that_have_no_room_for_the_patch_are_said_to_be_left_out(kit: Any, tmp_path: Path) -> None:
    with kit.start(tmp_path / "log", "--threat", "40") as server:
        assert "note: no picture of sample has room for a 40x40 patch; none is offered" in server.log.read_text()
        assert httpx.get(f"{server.address}/v1/samples").json() == {"samples": []}


@pytest.mark.slow
def test_ctrl_c_is_a_clean_end_too(kit: Any, tmp_path: Path) -> None:
    with kit.start(tmp_path / "log", "--data", "none", "--masks", "2") as server:
        server.process.send_signal(signal.SIGINT)
        assert server.process.wait(30) == 0
    assert "Traceback" not in server.log.read_text()


def test_a_port_that_is_taken_is_said(tiny_server: Any) -> None:
    port = tiny_server.address.rpartition(":")[2]
    done = subprocess.run(
        [sys.executable, "-m", "patchcleanser", "serve", "--port", port], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert f"cannot listen at 127.0.0.1:{port}" in done.stderr
    assert "use another --port" in done.stderr


def test_the_snippet_of_the_documentation_runs(tiny_server: Any, capsys: pytest.CaptureFixture[str]) -> None:
    page = (Path(__file__).parents[2] / "docs" / "guide" / "serve.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)
    exec(compile(block.replace("http://127.0.0.1:8000", tiny_server.address), "serve.md", "exec"), {})
    assert capsys.readouterr().out == "8 ship agreed\nTrue 1.0\n"


def test_a_host_that_is_none_is_named_and_not_the_port() -> None:
    with pytest.raises(InputError, match=r"cannot listen at host\.invalid:0: .*; use another --host$"):
        _listen("host.invalid", 0)
