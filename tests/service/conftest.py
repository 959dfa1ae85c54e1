"""A real server on a port of its own, and pictures to send to it."""

from __future__ import annotations

import io
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import numpy as np
import pytest
import torch
import uvicorn
from fastapi.testclient import TestClient
from PIL import Image
from torch.nn import functional

from patchcleanser import CallableClassifier, Threat
from patchcleanser.service.app import create_app
from patchcleanser.service.config import Limits, ServiceSettings
from patchcleanser.service.protocol import server_config

CLASSES = ("moss", "rust", "salt", "tar")


WEIGHTS = torch.randn(4, 3 * 64, generator=torch.Generator().manual_seed(5))


def noisy(x: torch.Tensor) -> torch.Tensor:
    """Random weights on 8×8 means: images of any size, and masks that often disagree."""
    return functional.adaptive_avg_pool2d(x, 8).flatten(1) @ WEIGHTS.T


def clear_picture() -> np.ndarray:
    """16×16 px that are so much of the first class that it can be certified."""
    bright = (WEIGHTS[0].reshape(3, 8, 8) > 0).permute(1, 2, 0).numpy().astype(np.uint8)
    return np.kron(bright, np.full((2, 2, 1), 255, dtype=np.uint8))


def toy(**changed: object) -> ServiceSettings:
    model = CallableClassifier(noisy, array="torch", fingerprint="noisy")
    model.names = CLASSES
    given: dict[str, object] = {
        "model": model,
        "threat": Threat.square(3),
        "masks": 3,
        "samples": None,
        "hosts": ("testserver",),
    }
    return ServiceSettings(**{**given, **changed})  # type: ignore[arg-type]


def png(
    pixels: np.ndarray | None = None, *, seed: int = 0, size: tuple[int, int] = (16, 16), kind: str = "PNG"
) -> bytes:
    if pixels is None:
        pixels = np.random.default_rng(seed).integers(0, 256, (*size, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, format=kind)
    return file.getvalue()


def upload(*contents: bytes) -> list[tuple[str, tuple[str, bytes, str]]]:
    return [("image", ("x.png", content, "image/png")) for content in contents]


class Kit:
    """What tests of the service share; conftest cannot be imported."""

    toy = staticmethod(toy)
    png = staticmethod(png)
    upload = staticmethod(upload)
    clear_picture = staticmethod(clear_picture)

    @staticmethod
    def served(settings: ServiceSettings) -> AbstractContextManager[str]:
        return serve_here(settings)

    @staticmethod
    def start(log: Path, *options: str, **environment: str) -> Server:
        return start_server(log, *options, **environment)


@pytest.fixture(scope="session")
def kit() -> type[Kit]:
    return Kit


@pytest.fixture(scope="module")
def client() -> Iterator[TestClient]:
    with TestClient(create_app(toy())) as asking:
        yield asking


@pytest.fixture
def small() -> Iterator[TestClient]:
    """One with limits that are easily met."""
    limits = Limits(body_bytes=40_000, file_bytes=9_000, files=2, pixels=1000, queue=4, deadline=5)
    with TestClient(create_app(toy(limits=limits))) as asking:
        yield asking


@contextmanager
def serve_here(settings: ServiceSettings) -> Iterator[str]:
    """A server on a real socket, in a thread of this process; its address."""
    listening = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(server_config(create_app(settings)))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
    thread.start()
    try:
        while not server.started:
            assert thread.is_alive(), "the server did not start"
            time.sleep(0.01)
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()


@dataclass
class Server:
    """A server in a process of its own."""

    process: subprocess.Popen[bytes]
    address: str
    log: Path

    def lines(self) -> list[dict[str, object]]:
        return [json.loads(line) for line in self.log.read_text().splitlines() if line.startswith("{")]

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(timeout=120)


def start_server(log: Path, *options: str, **environment: str) -> Server:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "patchcleanser", "serve", "--port", str(port), *options]
    with log.open("wb") as file:
        process = subprocess.Popen(command, stderr=file, env={**os.environ, "OMP_NUM_THREADS": "1", **environment})
    address = f"http://127.0.0.1:{port}"
    for _ in range(1800):
        try:
            if httpx.get(f"{address}/readyz").status_code == 200:
                return Server(process, address, log)
        except httpx.TransportError:
            pass
        if process.poll() is not None:
            raise AssertionError(log.read_text())
        time.sleep(0.1)
    process.kill()
    raise AssertionError("the server did not come up in three minutes")


@pytest.fixture(scope="session")
def tiny_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The default: zoo:tiny and its samples."""
    with start_server(tmp_path_factory.mktemp("server") / "log") as server:
        yield server
        assert server.stop() == 0
