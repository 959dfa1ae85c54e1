"""One client among several: its share of every bounded thing, and decoders that are killed when they take too long."""

from __future__ import annotations

import io
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import anyio
import httpx
import numpy as np
import psutil
import pytest
import torch
from PIL import Image

from patchcleanser import CallableClassifier
from patchcleanser.data.codec import decode
from patchcleanser.errors import DataError, InputError
from patchcleanser.service.config import Limits
from patchcleanser.service.decoding import Decoders, unpack

KEYS = ("first key of sixteen", "second key of sixteen")
SIDE = 4096


def encoded(picture: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    file = io.BytesIO()
    picture.save(file, format=kind, **options)
    return file.getvalue()


def wait_for(true: Callable[[], bool], what: str) -> None:
    for _ in range(1500):
        if true():
            return
        time.sleep(0.02)
    raise AssertionError(what)


class Asking:
    """Two clients of one server behind one proxy, and what is queued there."""

    def __init__(self, kit: Any, address: str) -> None:
        self.kit, self.address = kit, address

    def predict(self, client: int, *contents: bytes) -> httpx.Response:
        headers = {"x-forwarded-for": f"10.0.0.{client}", "x-api-key": KEYS[client % 2]}
        url = f"{self.address}/v1/predict"
        return httpx.post(url, files=self.kit.upload(*contents), headers=headers, timeout=120)

    def queued(self) -> float:
        text = httpx.get(f"{self.address}/metrics", headers={"x-api-key": KEYS[0]}).text
        return float(text.split("\npatchcleanser_queue_images ")[1].split()[0])


def decoder_processes(pid: int) -> list[psutil.Process]:
    children = psutil.Process(pid).children(recursive=True)
    return [child for child in children if any("to_process" in part for part in child.cmdline())]


def over_share(answer: httpx.Response, words: str) -> None:
    assert answer.status_code == 429, answer.text
    assert answer.json()["error"]["code"] == "too-many-requests"
    assert re.search(words, answer.json()["error"]["message"])
    assert int(answer.headers["retry-after"]) >= 1


def test_large_pictures_of_one_client_do_not_keep_a_small_one_of_another_out(kit: Any) -> None:
    """Four files of 2 kB filled the queue of pixels for as long as the deadline."""
    content = encoded(Image.new("1", (SIDE, SIDE)))
    assert len(content) < 3000
    with kit.served(kit.toy(masks=2, proxies=("127.0.0.1",))) as address, ThreadPoolExecutor(4) as pool:
        asking = Asking(kit, address)
        attack = [pool.submit(asking.predict, 1, content) for _ in range(4)]
        wait_for(
            lambda: asking.queued() + sum(future.done() for future in attack) >= 4, "all of them are in or refused"
        )
        assert asking.predict(2, kit.png()).status_code == 200
        answers = [future.result() for future in attack]
        for answer in answers:
            if answer.status_code != 200:
                over_share(answer, r"would have 33,554,432 pixels here at once; at most 16,777,216 are taken; wait")
        assert {answer.status_code for answer in answers} == {200, 429}


def test_large_requests_of_many_clients_leave_room_for_small_ones(kit: Any) -> None:
    limits = Limits(pixels=100 * 100, queue_pixels=4 * 100 * 100, small_pixels=50 * 50, queue=100, decoders=1)
    gate, model = gated()
    with kit.served(kit.toy(model=model, proxies=("127.0.0.1",), limits=limits)) as address:
        asking = Asking(kit, address)
        with ThreadPoolExecutor(8) as pool:
            gate.clear()
            large = [pool.submit(asking.predict, client, kit.png(size=(100, 100))) for client in range(4)]
            wait_for(
                lambda: asking.queued() == 3 and any(future.done() for future in large), "three are in, one is not"
            )
            small = pool.submit(asking.predict, 5, kit.png())
            wait_for(lambda: asking.queued() == 4, "the small one is in")
            gate.set()
            assert small.result().status_code == 200
            answers = [future.result() for future in large]
        assert sorted(answer.status_code for answer in answers) == [200, 200, 200, 503]
        assert {a.json()["error"]["code"] for a in answers if a.status_code == 503} == {"overloaded"}


def gated() -> tuple[threading.Event, CallableClassifier]:
    """A model that answers when it is let."""
    gate = threading.Event()
    gate.set()

    def model(x: torch.Tensor) -> torch.Tensor:
        assert gate.wait(60)
        return x.mean((2, 3))

    return gate, CallableClassifier(model, array="torch")


@pytest.mark.parametrize(
    ("limits", "words"),
    [
        (Limits(files=2, queue=8), "would have 3 images here at once; at most 2 are taken"),
        (Limits(body_bytes=40_000, queue_bytes=160_000), r"would have [\d,]+ bytes here at once; at most 40,000"),
    ],
)
@pytest.mark.parametrize("by", ["address", "key"])
def test_a_client_over_its_share_is_refused_while_another_is_answered(
    kit: Any, limits: Limits, words: str, by: str
) -> None:
    gate, model = gated()
    tells = {"proxies": ("127.0.0.1",)} if by == "address" else {"api_key": KEYS}
    large = kit.png(size=(100, 60))  # 18 kB
    with kit.served(kit.toy(model=model, limits=limits, **tells)) as address, ThreadPoolExecutor(3) as pool:
        asking = Asking(kit, address)
        gate.clear()
        first = [pool.submit(asking.predict, 1, large) for _ in range(2)]
        wait_for(lambda: asking.queued() == 2, "two are in")
        over_share(asking.predict(1, large), words)
        other = pool.submit(asking.predict, 2, large)
        wait_for(lambda: asking.queued() == 3, "the other client's is in")
        gate.set()
        assert [future.result().status_code for future in (*first, other)] == [200] * 3
        assert asking.predict(1, large).status_code == 200


def endless_jpeg() -> bytes:
    """A progressive JPEG whose second scan comes thousands of times: minutes of decoding in 100 kB."""
    content = encoded(Image.new("L", (SIDE, SIDE), 90), "JPEG", progressive=True)
    starts = [match.start() for match in re.finditer(rb"\xff\xda", content)]
    end = content.index(b"\xff\xc4", starts[1])
    return content[:end] + content[starts[1] : end] * (9_000_000 // (end - starts[1])) + b"\xff\xd9"


def test_a_decoder_that_takes_too_long_is_killed_and_the_next_picture_decoded(kit: Any) -> None:
    earlier = decoder_processes(os.getpid())
    with kit.served(kit.toy(limits=Limits(decode_seconds=3))) as address:
        asking = Asking(kit, address)
        assert asking.predict(1, kit.png()).status_code == 200
        (busy,) = set(decoder_processes(os.getpid())) - set(earlier)
        answer = asking.predict(1, endless_jpeg())
        assert (answer.status_code, answer.json()["error"]["code"]) == (422, "bad-image")
        assert "takes longer to decode than 3 s, the limit; save it" in answer.json()["error"]["message"]
        assert not busy.is_running()
        assert asking.predict(1, kit.png()).status_code == 200
        assert asking.queued() == 0


def test_one_client_has_one_decoder_and_large_pictures_not_all(kit: Any) -> None:
    """Each waits for its turn; neither takes the last one from others' small pictures."""

    async def waits(*turns: tuple[str, int]) -> bool:
        """Whether the last of these turns has to wait for one of the others."""
        decoders = Decoders(Limits(decoders=2, small_pixels=100))
        async with anyio.create_task_group() as group:
            for client, pixels in turns[:-1]:
                await group.start(hold, decoders, client, pixels)
            with anyio.move_on_after(0.2) as scope:
                async with decoders.turn(turns[-1][0], pixels=turns[-1][1]):
                    pass
            group.cancel_scope.cancel()
        return scope.cancelled_caught

    async def hold(decoders: Decoders, client: str, pixels: int, *, task_status: Any) -> None:
        async with decoders.turn(client, pixels=pixels):
            task_status.started()
            await anyio.sleep_forever()

    assert anyio.run(waits, ("a", 1), ("a", 1))
    assert anyio.run(waits, ("a", 101), ("b", 101))
    assert not anyio.run(waits, ("a", 1), ("b", 1))
    assert not anyio.run(waits, ("a", 101), ("b", 1))


def decoded(content: bytes, limits: Limits | None = None) -> np.ndarray:
    """As a decoder sees it."""
    return unpack(anyio.run(Decoders(limits or Limits()).decode, content, 0))


@pytest.mark.parametrize("mode", ["RGB", "RGBA", "L", "P", "1", "I;16"])
def test_decoders_give_what_the_library_decodes(mode: str) -> None:
    values = np.random.default_rng(0).integers(0, 256, (9, 7, 3), dtype=np.uint8)
    picture = Image.fromarray(values)
    if mode == "I;16":
        picture = Image.fromarray(values[..., 0].astype(np.uint16) * 257 - 3)
    content = encoded(picture if mode == "I;16" else picture.convert(mode))
    assert np.array_equal(decoded(content), decode(content, "x").numpy())


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="other systems do not hold a process to the limit")
def test_a_picture_that_needs_more_memory_than_a_decoder_has_is_an_error() -> None:
    content = encoded(Image.new("1", (SIDE, SIDE)))
    with pytest.raises(DataError, match=r"MemoryError|allocate|memory"):
        decoded(content, Limits(pixels=1000))


def test_decoders_do_not_load_torch() -> None:
    code = "import patchcleanser.service.decoding, sys; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_ctrl_c_in_a_terminal_does_not_reach_decoders(tiny_server: Any, kit: Any) -> None:
    """It goes to all processes there; the service still answers what it accepted."""
    asking = Asking(kit, tiny_server.address)
    assert asking.predict(1, kit.png()).status_code == 200
    for process in decoder_processes(tiny_server.process.pid):
        process.send_signal(signal.SIGINT)
    assert asking.predict(1, kit.png()).status_code == 200


@pytest.mark.parametrize("end", [signal.SIGTERM, signal.SIGKILL])
def test_no_decoder_outlives_the_service(kit: Any, tmp_path: Path, end: signal.Signals) -> None:
    with kit.start(tmp_path / "log", "--data", "none", "--masks", "2") as server:
        assert Asking(kit, server.address).predict(1, kit.png()).status_code == 200
        processes = decoder_processes(server.process.pid)
        assert processes
        server.process.send_signal(end)
        server.process.wait(60)
    wait_for(lambda: not any(process.is_running() for process in processes), "all of them have ended")


@pytest.mark.parametrize("name", ["client_share", "small_share"])
def test_shares_are_parts(name: str) -> None:
    with pytest.raises(InputError, match=f"{name} is a part"):
        Limits(**{name: 1.5})
