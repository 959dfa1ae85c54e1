"""Hostile bytes on real sockets: what no request may hold, and for how long, before and after the app sees it."""

from __future__ import annotations

import itertools
import socket
import time
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import httpx
import psutil
import pytest

from patchcleanser.service.config import Limits

GET = b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\n"
POST = b"POST /v1/predict HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
CHUNKED = POST + b"Transfer-Encoding: chunked\r\n\r\n"
SMALL_HEADERS = b"".join(b"x%d: y\r\n" % number for number in range(6000))
LONG = b"a" * 65536
FLOOD = 32_000_000
"""Bytes an attacker sends: the server that kept them grew by more than ten times as many."""


def connect(address: str) -> socket.socket:
    where = httpx.URL(address)
    connection = socket.create_connection((where.host, where.port or 80))
    connection.settimeout(60)
    return connection


def answer_to(address: str, parts: Iterable[bytes]) -> bytes:
    """What comes back until the server closes; it may do so before everything was sent."""
    with connect(address) as connection:
        try:
            for part in parts:
                connection.sendall(part)
        except OSError:
            pass
        return b"".join(iter(lambda: connection.recv(65536), b""))


def flood(piece: bytes) -> Iterator[bytes]:
    return itertools.repeat(piece, FLOOD // len(piece))


@pytest.mark.parametrize(
    ("start", "piece", "status", "code"),
    [
        pytest.param(GET, SMALL_HEADERS, 431, b"headers-too-large", id="many small headers"),
        pytest.param(GET + b"x: ", LONG, 431, b"headers-too-large", id="one long header"),
        pytest.param(b"GET /", LONG, 414, b"url-too-long", id="a long address"),
        pytest.param(CHUNKED + b"0\r\n", SMALL_HEADERS, 431, b"headers-too-large", id="trailers"),
        pytest.param(CHUNKED + b"1;", LONG, 431, b"headers-too-large", id="a chunk's extension"),
        pytest.param(CHUNKED, b"1\r\na\r\n" * 10_000, 400, b"bad-request", id="tiny chunks"),
        pytest.param(GET + b"\r\n" + GET, SMALL_HEADERS, 431, b"headers-too-large", id="a second, pipelined request"),
    ],
)
def test_a_flood_before_or_beside_the_body_is_refused_and_not_kept(
    tiny_server: Any, start: bytes, piece: bytes, status: int, code: bytes
) -> None:
    server = psutil.Process(tiny_server.process.pid)
    before = server.memory_info().rss
    answers = answer_to(tiny_server.address, itertools.chain([start], flood(piece))).split(b"HTTP/1.1 ")
    assert answers[-1].startswith(b"%d " % status)
    assert code in answers[-1]
    assert b"\r\nconnection: close\r\n" in answers[-1]
    assert server.memory_info().rss - before < FLOOD
    assert httpx.get(f"{tiny_server.address}/healthz").status_code == 200


@pytest.mark.parametrize(
    ("head", "status"),
    [
        (GET + b"".join(b"x%d: y\r\n" % n for n in range(99)), 200),
        (GET + b"".join(b"x%d: y\r\n" % n for n in range(100)), 431),
        (GET + b"x: " + b"a" * 32_000 + b"\r\n", 200),
        (GET + b"x: " + b"a" * 33_000 + b"\r\n", 431),
        (GET.replace(b"/healthz", b"/healthz?" + b"a" * 8000), 200),
        (GET.replace(b"/healthz", b"/healthz?" + b"a" * 9000), 414),
    ],
)
@pytest.mark.parametrize("piece", [100, 100_000])
def test_headers_are_bounded_alike_whole_and_dripped(tiny_server: Any, head: bytes, status: int, piece: int) -> None:
    content = head + b"Connection: close\r\n\r\n" if status == 200 and b"x98" not in head else head + b"\r\n"
    with connect(tiny_server.address) as connection:
        for start in range(0, len(content), piece):
            connection.sendall(content[start : start + piece])
        assert connection.recv(65536).startswith(b"HTTP/1.1 %d " % status)


def test_pipelined_requests_and_large_chunks_are_answered(tiny_server: Any, kit: Any) -> None:
    last = GET + b"Connection: close\r\n\r\n"
    assert answer_to(tiny_server.address, [(GET + b"\r\n") * 4 + last]).count(b'{"status":"ok"}') == 5
    request = httpx.Request("POST", tiny_server.address, files=kit.upload(kit.png(size=(100, 100))))
    content = request.read()
    chunks = (content[at : at + 600] for at in range(0, len(content), 600))
    headers = {"content-type": request.headers["content-type"]}
    assert httpx.post(f"{tiny_server.address}/v1/predict", content=chunks, headers=headers, timeout=60).is_success


def test_no_other_parser_takes_over_a_connection(tiny_server: Any) -> None:
    upgrade = b"Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: eA==\r\n"
    with connect(tiny_server.address) as connection:
        connection.sendall(GET + upgrade + b"\r\n")
        assert connection.recv(65536).startswith(b"HTTP/1.1 200 ")


def served(kit: Any, **limits: Any) -> AbstractContextManager[str]:
    """A server with limits of its own."""
    return kit.served(kit.toy(limits=Limits(**limits)))  # type: ignore[no-any-return]


def test_headers_that_come_too_slowly_are_408_and_idle_connections_are_closed(kit: Any) -> None:
    with served(kit, head_seconds=0.5) as address:
        assert answer_to(address, [GET]).startswith(b"HTTP/1.1 408 ")
        assert answer_to(address, []) == b""
        second = answer_to(address, [GET + b"\r\n" + GET]).split(b"HTTP/1.1 ")
        assert [part[:3] for part in second] == [b"", b"200", b"408"], "also after a first request"


def test_a_body_that_is_refused_does_not_hold_its_connection(kit: Any) -> None:
    def slowly() -> Iterator[bytes]:
        yield POST + b"Content-Length: 99999999\r\n\r\n"
        while True:  # until the connection breaks
            yield b"x"
            time.sleep(0.05)

    with served(kit) as address:
        assert b"too-large" in answer_to(address, slowly())


def test_a_client_that_does_not_read_its_answers_is_cut_off(kit: Any) -> None:
    with served(kit, deadline=0.5) as address, connect(address) as connection:
        request = GET.replace(b"/healthz", b"/openapi.json") + b"\r\n"
        endless = itertools.repeat(request, 100_000)
        with pytest.raises(OSError):  # noqa: PT011 - reset or broken, as the system has it
            any(connection.sendall(part) for part in endless)
        assert httpx.get(f"{address}/healthz").status_code == 200


def test_one_address_has_a_share_of_the_connections(kit: Any) -> None:
    with served(kit, client_connections=3) as address:
        some = [connect(address) for _ in range(3)]
        assert answer_to(address, []).startswith(b"HTTP/1.1 429 ")
        for connection in some:
            connection.close()
        for _ in range(100):
            if httpx.get(f"{address}/healthz").status_code == 200:
                return
            time.sleep(0.05)
        raise AssertionError("closed connections count no more")


def test_there_are_no_more_connections_than_allowed(kit: Any) -> None:
    with served(kit, connections=2) as address, connect(address), connect(address):
        assert answer_to(address, []).startswith(b"HTTP/1.1 503 ")
