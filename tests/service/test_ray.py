"""The service on Ray Serve: the answers are the plain service's, also while replicas die or are replaced."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import psutil
import pytest
import torch
from fastapi.testclient import TestClient

pytest.importorskip("ray")
import ray
from ray import serve

from patchcleanser import Threat, load_dataset
from patchcleanser.cluster.deployment import NAME, Replicas, deploy, undeploy
from patchcleanser.errors import ClusterError, InputError
from patchcleanser.service.app import create_app
from patchcleanser.service.client import Client
from patchcleanser.service.config import ServiceSettings

pytestmark = pytest.mark.filterwarnings("default")  # Ray's own
SETTINGS = ServiceSettings(threat=Threat.square(5), masks=3, device="cpu")
IMAGES = load_dataset("sample")


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """Two replicas on a Ray of their own."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    ray.shutdown()
    os.environ["RAY_TQDM_PATCH_PRINT"] = "0"  # as `connect` does
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False)
    deploy(SETTINGS, Replicas(2, 2), port=port)
    yield f"http://127.0.0.1:{port}"
    undeploy()
    serve.shutdown()
    ray.shutdown()


def same(answer: Any) -> Any:
    return {k: v for k, v in answer.items() if k not in ("request_id", "milliseconds")}


@pytest.mark.slow
def test_answers_are_those_of_the_plain_service(address: str) -> None:
    import httpx

    torch.set_num_threads(1)  # as a replica has: the number of threads decides how sums are rounded
    files = [("image", (str(n), IMAGES.content(n))) for n in range(4)]
    assert IMAGES.labels is not None
    labels = {"labels": [str(label) for label in IMAGES.labels[:4]], "maps": "true"}
    with (
        TestClient(create_app(SETTINGS), base_url="http://localhost") as plain,
        httpx.Client(base_url=address, timeout=120) as there,
    ):
        for route, data in (("/v1/predict", {"details": "true"}), ("/v1/certify", labels)):
            request = {"files": files, "data": data}
            assert same(there.post(route, **request).json()) == same(plain.post(route, **request).json())
        for route in ("/v1/model", "/v1/masks?height=40&width=30", "/v1/samples", "/readyz", "/healthz"):
            assert same(there.get(route).json()) == same(plain.get(route).json())
        wrong = [c.post("/v1/predict", files=[("image", ("0", b"no picture"))]) for c in (there, plain)]
        assert wrong[0].status_code == wrong[1].status_code >= 400
        assert there.get("/").text == plain.get("/").text


def under_load(address: str, harm: Callable[[], None], images: int = 40) -> list[int]:
    """The label of each image, asked for by several clients while harm is done."""
    labels = [-1] * images
    failed: list[Exception] = []

    def ask(first: int) -> None:
        try:
            with Client(address, timeout=120, retries=3) as client:
                for index in range(first, images, 4):
                    labels[index] = client.predict([IMAGES.content(index)])[0].label
        except Exception as error:
            failed.append(error)

    threads = [threading.Thread(target=ask, args=(first,)) for first in range(4)]
    for thread in threads:
        thread.start()
    harm()
    for thread in threads:
        thread.join()
    assert failed == []
    return labels


def kill_a_replica() -> None:
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if f"ServeReplica:{NAME}" in " ".join(process.cmdline()):
                process.kill()
                return
    raise AssertionError("no replica to kill")


@pytest.mark.slow
def test_a_replica_killed_under_load_loses_no_request_that_is_asked_again(address: str) -> None:
    with TestClient(create_app(SETTINGS), base_url="http://localhost") as plain:
        expected = [
            plain.post("/v1/predict", files=[("image", ("0", IMAGES.content(n)))]).json()["predictions"][0]["label"]
            for n in range(40)
        ]
    assert under_load(address, kill_a_replica) == expected


@pytest.mark.slow
def test_new_weights_come_without_a_gap(address: str) -> None:
    with Client(address) as client:
        before = client.model().fingerprint
        port = int(address.rpartition(":")[2])
        # Not one of random weights: each replica would have its own.
        new = ServiceSettings(model="zoo:cifar10-mlp", threat=Threat.square(5), masks=2)
        labels = under_load(address, lambda: deploy(new, Replicas(2, 2), port=port))
        assert -1 not in labels
        assert client.model().fingerprint != before


@pytest.mark.slow
def test_a_model_that_does_not_load_is_said_and_the_old_one_answers_on(address: str) -> None:
    with Client(address) as client:
        before = client.model()
        with pytest.raises(ClusterError, match=r"the replicas do not start: .*nowhere"):
            deploy(ServiceSettings(model="trained:/nowhere"), Replicas(2, 2), port=int(address.rpartition(":")[2]))
        assert client.model() == before


@pytest.mark.parametrize("text", ["0", "3-2", "many", "-1", "1-"])
def test_a_number_of_replicas_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(InputError, match="replicas"):
        Replicas.parse(text)


def test_replicas_follow_the_load_if_a_range_is_given() -> None:
    assert Replicas.parse("3").options["num_replicas"] == 3
    scaling = Replicas.parse("1-8", gpus=1).options
    assert (scaling["autoscaling_config"]["min_replicas"], scaling["autoscaling_config"]["max_replicas"]) == (1, 8)
    assert scaling["ray_actor_options"] == {"num_cpus": 1, "num_gpus": 1}
