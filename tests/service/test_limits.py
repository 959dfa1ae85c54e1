"""What is refused, how, and before what; and what no answer ever says."""

from __future__ import annotations

import base64
import json
import logging
import re
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest
import torch
from fastapi.testclient import TestClient

from patchcleanser import CallableClassifier, Threat
from patchcleanser.errors import InputError, NotAFunctionError
from patchcleanser.service import decoding, model, schemas
from patchcleanser.service.app import create_app
from patchcleanser.service.config import Limits
from patchcleanser.service.middleware import REQUEST_ID, JsonLines
from patchcleanser.service.problems import PROBLEMS

KEY = "correct horse battery"


def refused(answer: Any, code: str) -> dict[str, Any]:
    assert answer.status_code == PROBLEMS[code][0], answer.text
    error = answer.json()["error"]
    assert error["code"] == code
    assert error["request_id"] == answer.headers["x-request-id"]
    assert not re.search(r"Traceback|File \"|/home|/usr|site-packages|0x[0-9a-f]{6}", answer.text)
    return error


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"content": b"{", "headers": {"content-type": "application/json"}}, "bad-request"),
        ({"content": b"x", "headers": {"content-type": "multipart/form-data; boundary=b"}}, "bad-request"),
        ({"content": b"x", "headers": {"content-type": "multipart/form-data"}}, "bad-request"),
        ({"content": b"x", "headers": {"content-type": "text/plain"}}, "unsupported-media"),
        ({"json": {}}, "invalid"),
        ({"json": {"images": []}}, "invalid"),
        ({"json": {"images": ["%%%"]}}, "invalid"),
        ({"json": {"images": ["é"]}}, "invalid"),
        ({"json": {"images": [""]}}, "unsupported-media"),
        ({"json": {"images": [base64.b64encode(b"no picture").decode()]}}, "unsupported-media"),
        ({"json": {"images": ["AAAA"], "mask": 3}}, "invalid"),
        ({"json": {"images": ["AAAA"], "masks": 9}}, "invalid"),
        ({"json": {"images": ["AAAA"], "masks": 0}}, "invalid"),
        ({"json": {"images": ["AAAA"] * 3}}, "too-large"),
        ({"json": {"images": ["A" * 16000]}}, "too-large"),
        ({"json": {"images": [1] * 500}}, "too-large"),
        ({"json": {"images": ["AAAA"], **{f"{n}": [] for n in range(500)}}}, "too-large"),
        ({"content": b"x" * 50_000, "headers": {"content-type": "application/json"}}, "too-large"),
        ({"data": {"masks": "3"}, "files": [("other", ("x", b"x"))]}, "invalid"),
        ({"files": [("image", ("x", b"x"))] * 3}, "too-large"),
        ({"files": [("image", ("x", b"x" * 9001))]}, "too-large"),
        ({"data": {"masks": ["3", "4"]}, "files": [("image", ("x", b"x"))]}, "invalid"),
    ],
)
def test_requests_that_are_refused(small: TestClient, change: dict[str, Any], code: str) -> None:
    refused(small.post("/v1/predict", **change), code)


def test_wrong_values_in_json_cost_no_more_than_right_ones(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    """The validator keeps an error for each: 32 MiB of them were 10 GiB, and minutes without answers."""
    monkeypatch.setattr(schemas.PredictBody, "model_validate_json", lambda _: 1 / 0)
    for body in (b'{"images":[' + b"1," * 100_000 + b"1]}", b"[" * 100_000, b'{"a":{},' * 100_000):
        refused(client.post("/v1/predict", content=body, headers={"content-type": "application/json"}), "too-large")


def test_as_many_labels_can_be_sent_as_images(kit: Any) -> None:
    with TestClient(create_app(kit.toy(limits=Limits(files=100)))) as client:
        files = kit.upload(*[kit.png(size=(4, 4))] * 100)
        answer = client.post("/v1/certify", files=files, data={"labels": ["0"] * 100, "masks": "1"})
        assert len(answer.json()["certificates"]) == 100


def test_a_body_that_hides_its_length_is_cut_off(small: TestClient) -> None:
    def endless() -> Iterator[bytes]:
        for _ in range(1000):
            yield b"x" * 1000

    refused(small.post("/v1/predict", content=endless(), headers={"content-type": "application/json"}), "too-large")


def test_too_many_pixels_are_refused_before_they_are_decoded(
    kit: Any, small: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = kit.png(np.zeros((40, 30, 3), dtype=np.uint8))
    monkeypatch.setattr(decoding.Decoders, "decode", lambda *_: pytest.fail("it was decoded"))
    error = refused(small.post("/v1/predict", files=kit.upload(content)), "too-large")
    assert error["image"] == 0


def test_formats_that_are_not_allowed_are_not_opened(kit: Any, client: TestClient) -> None:
    assert client.post("/v1/predict", files=kit.upload(kit.png(kind="JPEG"))).status_code == 200
    refused(client.post("/v1/predict", files=kit.upload(kit.png(kind="TIFF"))), "unsupported-media")


def test_a_damaged_image_is_named_by_its_number(kit: Any, client: TestClient) -> None:
    error = refused(client.post("/v1/predict", files=kit.upload(kit.png(), kit.png()[:200])), "bad-image")
    assert error["image"] == 1


def test_an_image_too_small_for_the_patch_is_refused_with_the_reason(kit: Any, client: TestClient) -> None:
    error = refused(client.post("/v1/predict", files=kit.upload(kit.png(size=(2, 2)))), "bad-fit")
    assert "patch of 3 px does not fit" in error["message"]
    refused(client.get("/v1/masks", params={"height": 2, "width": 9}), "bad-fit")
    refused(client.get("/v1/masks", params={"height": 100_000, "width": 100_000}), "too-large")
    refused(client.get("/v1/masks", params={"height": "x", "width": 9}), "invalid")


def test_labels_must_be_classes_and_as_many_as_images(kit: Any, client: TestClient) -> None:
    for labels in ([4], [-1], [10**30], [0, 1], []):
        refused(client.post("/v1/certify", files=kit.upload(kit.png()), data={"labels": labels}), "invalid")


def test_unknown_addresses_and_methods_are_errors_of_the_same_form(client: TestClient) -> None:
    refused(client.get("/v1/nothing"), "not-found")
    refused(client.get("/page/../app.py"), "not-found")
    refused(client.get("/page/%2e%2e%2fapp.py"), "not-found")
    refused(client.get("/v1/samples/0"), "not-found")
    answer = client.get("/v1/predict")
    refused(answer, "method-not-allowed")
    assert answer.headers["allow"] == "POST"


def gated(kit: Any, **limits: Any) -> tuple[TestClient, threading.Event]:
    """A service whose model answers when it is let; it is let while warming up."""
    gate = threading.Event()
    gate.set()

    def model(x: torch.Tensor) -> torch.Tensor:
        assert gate.wait(30)
        return x.mean((2, 3))

    settings = kit.toy(model=CallableClassifier(model, array="torch"), limits=Limits(**limits))
    return TestClient(create_app(settings)), gate


def test_a_full_queue_is_503_with_retry_after_and_recovers(kit: Any) -> None:
    client, gate = gated(kit, queue=4, files=4)
    with client, ThreadPoolExecutor(4) as pool:
        gate.clear()
        waiting = [pool.submit(client.post, "/v1/predict", files=kit.upload(kit.png(seed=n))) for n in range(4)]
        while "patchcleanser_queue_images 4.0" not in client.get("/metrics").text:
            time.sleep(0.01)
        answer = client.post("/v1/predict", files=kit.upload(kit.png()))
        refused(answer, "overloaded")
        assert int(answer.headers["retry-after"]) >= 1
        assert client.get("/readyz").status_code == 200, "busy is not broken"
        gate.set()
        assert all(future.result().status_code == 200 for future in waiting)
        assert client.post("/v1/predict", files=kit.upload(kit.png())).status_code == 200
        assert "patchcleanser_queue_images 0.0" in client.get("/metrics").text


def test_bodies_that_are_held_are_bounded(kit: Any) -> None:
    client, gate = gated(kit, body_bytes=40_000, queue_bytes=60_000)
    with client, ThreadPoolExecutor(1) as pool:
        gate.clear()
        large = kit.upload(kit.png(size=(100, 120)))
        held = pool.submit(client.post, "/v1/predict", files=large)
        while "patchcleanser_queue_images 1.0" not in client.get("/metrics").text:
            time.sleep(0.01)
        answer = client.post("/v1/predict", files=large)
        refused(answer, "overloaded")
        assert int(answer.headers["retry-after"]) >= 1
        gate.set()
        assert held.result().status_code == 200
        assert client.post("/v1/predict", files=large).status_code == 200


def test_a_request_that_could_never_fit_is_not_told_to_come_back(kit: Any) -> None:
    client, _ = gated(kit, pixels=300, queue_pixels=300)
    with client:
        assert client.post("/v1/predict", files=kit.upload(kit.png())).status_code == 200
        refused(client.post("/v1/predict", files=kit.upload(kit.png(), kit.png())), "too-large")


@pytest.mark.parametrize("by", ["service", "request"])
def test_a_deadline_is_kept_and_the_work_dropped(kit: Any, by: str) -> None:
    client, gate = gated(kit, deadline=0.3 if by == "service" else 30)
    with client:
        gate.clear()
        data = {} if by == "service" else {"deadline_ms": "300"}
        refused(
            client.post("/v1/predict", files=kit.upload(kit.png()), data=data),
            "deadline" if by == "service" else "too-late",
        )
        gate.set()
        while "patchcleanser_queue_images 0.0" not in client.get("/metrics").text:
            time.sleep(0.01)
        assert client.post("/v1/predict", files=kit.upload(kit.png())).status_code == 200


def test_a_deadline_is_kept_while_all_decoders_are_busy(kit: Any) -> None:
    client, _ = gated(kit, deadline=2, decoders=2)
    with client:
        decoders, portal = client.app.state.service.decoders, client.portal  # type: ignore[attr-defined]
        with ExitStack() as busy:
            for name in ("one", "another"):
                busy.enter_context(portal.wrap_async_context_manager(decoders.turn(name)))  # type: ignore[union-attr]
            refused(client.post("/v1/predict", files=kit.upload(kit.png())), "deadline")
        assert client.post("/v1/predict", files=kit.upload(kit.png())).status_code == 200


def test_with_a_key_only_its_owner_gets_answers(kit: Any) -> None:
    with TestClient(create_app(kit.toy(api_key=KEY))) as client:
        for headers in (
            {},
            {"authorization": "Bearer wrong"},
            {"x-api-key": "wrong"},
            {"authorization": f"Basic {KEY}"},
        ):
            answer = client.get("/v1/model", headers=headers)
            refused(answer, "unauthorized")
            assert answer.headers["www-authenticate"] == "Bearer"
            refused(client.post("/v1/predict", files=kit.upload(kit.png()), headers=headers), "unauthorized")
        refused(client.get("/metrics"), "unauthorized")
        refused(client.get("/nothing"), "unauthorized")
        for headers in ({"authorization": f"Bearer {KEY}"}, {"x-api-key": KEY}):
            assert client.get("/v1/model", headers=headers).status_code == 200
        for address in ("/", "/page/page.js", "/healthz", "/readyz"):
            assert client.get(address).status_code == 200
    with pytest.raises(InputError, match="at least 16 characters"):
        kit.toy(api_key="short")


def test_another_sites_page_cannot_make_a_browser_ask(kit: Any, client: TestClient) -> None:
    answer = client.post("/v1/predict", files=kit.upload(kit.png()), headers={"sec-fetch-site": "cross-site"})
    refused(answer, "cross-site")
    plain = client.get("/v1/model", headers={"origin": "https://evil.example"})
    assert not any(name.startswith("access-control") for name in plain.headers)


def test_browsers_are_bound_to_our_own_files(client: TestClient) -> None:
    for address in ("/", "/v1/model", "/nothing"):
        policy = client.get(address).headers["content-security-policy"]
        assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self'")
        assert "unsafe" not in policy
    page = client.get("/").text
    assert not re.search(r"(src|href)=\"(https?:)?//|<style|style=|<script>| on\w+=\"", page)


def test_request_ids_are_taken_over_if_they_are_harmless(client: TestClient) -> None:
    assert client.get("/healthz", headers={"x-request-id": "camera-7.a"}).headers["x-request-id"] == "camera-7.a"
    for bad in ("a b", "x" * 65, 'a"}', ""):
        assert re.fullmatch(
            "[0-9a-f]{32}", client.get("/healthz", headers={"x-request-id": bad}).headers["x-request-id"]
        )


def test_a_fault_of_ours_is_a_500_without_a_trace_and_a_log_with_one(
    kit: Any, client: TestClient, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(*_: Any, **__: Any) -> None:
        raise RuntimeError("secret in /etc/shadow")

    monkeypatch.setattr(model.DefendedModel, "image_state", fails)
    with caplog.at_level(logging.INFO, logger="patchcleanser.service"):
        answer = client.post("/v1/predict", files=kit.upload(kit.png()))
    refused(answer, "internal")
    assert "secret" not in answer.text
    assert "secret in /etc/shadow" in caplog.text


def test_a_classifier_that_fails_is_said_to_have(kit: Any) -> None:
    calls: list[int] = []

    def breaks(x: torch.Tensor) -> torch.Tensor:
        calls.append(len(x))
        return x.mean((2, 3)) * (1.0 if len(calls) < 20 else torch.nan)

    with TestClient(create_app(kit.toy(model=CallableClassifier(breaks, array="torch")))) as client:
        codes = [client.post("/v1/predict", files=kit.upload(kit.png(seed=n))).status_code for n in range(30)]
        assert set(codes) == {200, 500}
        refused(client.post("/v1/predict", files=kit.upload(kit.png())), "classifier-failed")
        assert client.get("/readyz").status_code == 200


def test_log_lines_are_json_with_the_requests_id(kit: Any) -> None:
    record = logging.LogRecord("x", logging.INFO, __file__, 1, 'a "quoted"\nline', None, None)
    record.facts = {"status": 200}
    token = REQUEST_ID.set("r1")
    line = JsonLines().format(record)
    REQUEST_ID.reset(token)
    assert "\n" not in line
    entry = json.loads(line)
    assert (entry["request_id"], entry["status"], entry["event"]) == ("r1", 200, 'a "quoted"\nline')


def test_limits_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(InputError, match="must have room for one request's pixels"):
        Limits(pixels=100, queue_pixels=50)
    with pytest.raises(InputError, match="deadline must be above 0"):
        Limits(deadline=0)


def test_several_patches_fix_the_number_of_masks(kit: Any) -> None:
    with TestClient(create_app(kit.toy(threat=Threat.square(2, count=2), masks=2))) as client:
        assert client.post("/v1/predict", files=kit.upload(kit.png())).status_code == 200
        refused(client.post("/v1/predict", files=kit.upload(kit.png()), data={"masks": 4}), "invalid")


def test_what_is_wrong_with_a_model_is_said_before_anything_is_served(kit: Any) -> None:
    random = CallableClassifier(lambda x: torch.rand(len(x), 3), array="torch")
    with pytest.raises(NotAFunctionError, match="deterministic"):
        create_app(kit.toy(model=random))
    with pytest.raises(InputError, match="no defense 'nothing'"):
        create_app(kit.toy(defense="nothing"))


def test_samples_that_the_patch_does_not_fit_are_not_offered(kit: Any) -> None:
    with TestClient(create_app(kit.toy(threat=Threat.square(40), samples="sample"))) as client:
        assert client.get("/v1/samples").json() == {"samples": []}
        assert client.post("/v1/predict", files=kit.upload(kit.png(size=(64, 64)))).status_code == 200


def test_samples_of_classes_the_model_does_not_know_have_no_label(kit: Any) -> None:
    with TestClient(create_app(kit.toy(samples="sample"))) as client:
        samples = client.get("/v1/samples").json()["samples"]
        assert len(samples) == 30
        assert {sample["label"] for sample in samples} == {None}
        assert client.get("/v1/samples/29").headers["content-type"] == "image/png"
