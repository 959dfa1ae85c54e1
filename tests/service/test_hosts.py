"""Requests that a browser was tricked into: other names for this address, other sites' pages."""

from __future__ import annotations

import socket
from typing import Any

import httpx
import pytest
from fastapi.testclient import TestClient

from patchcleanser.errors import InputError
from patchcleanser.service.access import Proxies
from patchcleanser.service.app import create_app

EVIL = "evil.example"


def test_a_name_that_was_made_to_point_here_gets_nothing(tiny_server: Any) -> None:
    """DNS rebinding: the browser believes that this is evil.example, so Origin and Host agree."""
    port = httpx.URL(tiny_server.address).port
    for request in ("GET / ", "GET /v1/model ", "GET /metrics ", "POST /v1/predict "):
        with socket.create_connection(("127.0.0.1", port)) as connection:
            names = f"Host: {EVIL}:{port}\r\nOrigin: http://{EVIL}:{port}\r\nSec-Fetch-Site: same-origin"
            connection.sendall(
                f"{request}HTTP/1.1\r\n{names}\r\nContent-Length: 0\r\nConnection: close\r\n\r\n".encode()
            )
            answer = b"".join(iter(lambda: connection.recv(65536), b""))
        assert answer.startswith(b"HTTP/1.1 421 ")
        assert b"wrong-host" in answer


@pytest.mark.parametrize(
    ("host", "allowed"),
    [
        *((host, True) for host in ("localhost", "LOCALHOST:8000", "a.localhost:1", "127.0.0.1:8000", "10.1.2.3")),
        *((host, True) for host in ("[::1]:8000", "photos.example", "Photos.Example:443", "photos.example.")),
        *((host, False) for host in (EVIL, f"photos.example.{EVIL}", f"localhost.{EVIL}", f"localhost@{EVIL}", "")),
        *((host, False) for host in ("127.0.0.1.evil.example", "[::1", "localhost:x", "localhost/", "127.1.example")),
    ],
)
def test_localhost_addresses_and_allowed_names_are_served_and_no_others(kit: Any, host: str, allowed: bool) -> None:
    with TestClient(create_app(kit.toy(hosts=("photos.example",)))) as client:
        answer = client.get("/v1/model", headers={"host": host})
        assert answer.status_code == (200 if allowed else 421)
        if allowed:
            twice = [("host", host), ("host", EVIL)]
            assert client.get("/v1/model", headers=twice).status_code == 421


def test_any_host_can_be_allowed(kit: Any) -> None:
    with TestClient(create_app(kit.toy(hosts=("*",)))) as client:
        assert client.get("/v1/model", headers={"host": EVIL}).status_code == 200
    with pytest.raises(InputError, match="without scheme and port"):
        kit.toy(hosts=("http://photos.example",))


@pytest.mark.parametrize(
    ("headers", "allowed"),
    [
        ({}, True),
        ({"origin": "http://testserver"}, True),
        ({"origin": "https://testserver"}, True),
        ({"origin": "http://testserver", "sec-fetch-site": "same-origin"}, True),
        ({"sec-fetch-site": "none"}, True),
        ({"origin": "https://proxied.example", "sec-fetch-site": "same-origin"}, True),
        ({"origin": "http://testserver:3000"}, False),
        ({"origin": "http://testserver:3000", "sec-fetch-site": "same-site"}, False),
        ({"origin": "http://evil.example", "sec-fetch-site": "cross-site"}, False),
        ({"origin": "http://evil.example"}, False),
        ({"origin": "http://testserver.evil.example"}, False),
        ({"origin": "http://testserver@evil.example"}, False),
        ({"origin": "null"}, False),
        ({"origin": ""}, False),
        ({"origin": "http://testserver:x"}, False),
        ({"sec-fetch-site": "cross-site"}, False),
    ],
)
def test_posts_come_from_the_own_page_or_from_no_page(
    kit: Any, client: TestClient, headers: dict[str, str], allowed: bool
) -> None:
    answer = client.post("/v1/predict", files=kit.upload(kit.png()), headers=headers)
    assert answer.status_code == (200 if allowed else 403)
    assert client.get("/v1/model", headers=headers).status_code == 200, "what is only read needs no such check"


def test_only_trusted_proxies_say_who_the_client_is() -> None:
    proxies = Proxies(("10.0.0.0/8", "::1"))
    assert proxies.client("8.8.8.8", ["1.2.3.4"]) == "8.8.8.8"
    assert proxies.client("10.0.0.1", ["1.2.3.4"]) == "1.2.3.4"
    assert proxies.client("10.0.0.1", ["6.6.6.6, 1.2.3.4", "10.0.0.2"]) == "1.2.3.4"
    assert proxies.client("10.0.0.1", []) == "10.0.0.1"
    with pytest.raises(InputError, match="a proxy is an IP address or a network"):
        Proxies(("proxy.example",))
