"""What the service answers is what the library answers."""

from __future__ import annotations

import base64
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
from fastapi.testclient import TestClient

from patchcleanser import DoubleMasking
from patchcleanser.core.results import Case, Certificate
from patchcleanser.data.codec import decode
from patchcleanser.service import answers
from patchcleanser.service.app import create_app
from patchcleanser.service.model import SERVED


def pictures(kit: Any, number: int) -> list[bytes]:
    """Of two sizes in turn."""
    return [kit.png(seed=seed, size=(16, 16) if seed % 2 else (20, 14)) for seed in range(number)]


def offline(defense: Any, contents: list[bytes]) -> list[Any]:
    return defense.predict([decode(content, "x") for content in contents])


@pytest.mark.parametrize("name", [name for name in SERVED if name != "one-pass"])  # see tests/defenses/test_one_pass.py
def test_every_defense_answers_as_its_predict(kit: Any, name: str) -> None:
    settings = kit.toy(defense=name)
    contents = pictures(kit, 12)
    expected = offline(SERVED[name](settings.model, settings.threat, masks=3), contents)
    with TestClient(create_app(settings)) as client:
        predictions = client.post("/v1/predict", files=kit.upload(*contents)).json()["predictions"]
    for prediction, verdict in zip(predictions, expected, strict=True):
        assert (prediction["label"], prediction["classifications"]) == (verdict.label, verdict.classifications)
        if name == "minority-reports":
            assert (prediction["alert"], tuple(prediction["reporters"])) == (verdict.alert, verdict.reporters)
        else:
            assert (prediction["case"], tuple(prediction["disagreers"])) == (verdict.case.value, verdict.disagreers)
    if name == "double-masking":
        assert {prediction["case"] for prediction in predictions} >= {"disagreer", "majority"}, (
            "the images should make masks disagree"
        )


@pytest.mark.parametrize("name", ["double-masking", "challenger-masking"])
def test_a_coarse_round_answers_as_in_predict_and_shows_its_masks(kit: Any, name: str) -> None:
    settings = kit.toy(defense=name, options={"coarse": 2})
    contents = [*pictures(kit, 12), kit.png(kit.clear_picture())]
    expected = offline(SERVED[name](settings.model, settings.threat, masks=3, coarse=2), contents)
    with TestClient(create_app(settings)) as client:
        data = {"details": "true"}
        predictions = client.post("/v1/predict", files=kit.upload(*contents), data=data).json()["predictions"]
        assert client.get("/v1/model").json()["coarse"] == 2
        facts = client.get("/v1/masks", params={"height": 16, "width": 16}).json()
    assert (facts["predict_classifications"], facts["certify_classifications"]) == (4, 45 + 4)
    for prediction, verdict in zip(predictions, expected, strict=True):
        assert (prediction["case"], prediction["label"]) == (verdict.case.value, verdict.label)
        assert prediction["masks"] == len(prediction["details"]["masks"]) == (4 if verdict.case is Case.COARSE else 9)
        assert prediction["details"]["one_mask_labels"] == list(verdict.one_mask_labels)
        assert prediction["classifications"] == verdict.classifications
        assert bool(prediction["details"]["second_round"]) == bool(verdict.disagreers)
    assert {prediction["case"] for prediction in predictions} >= {"coarse", "majority"}


def test_the_suspected_window_is_the_deciding_mask(kit: Any, client: TestClient) -> None:
    settings, contents = kit.toy(), pictures(kit, 12)
    defense = DoubleMasking(settings.model, settings.threat, masks=3)
    expected = offline(defense, contents)
    predictions = client.post("/v1/predict", files=kit.upload(*contents)).json()["predictions"]
    for prediction, verdict, content in zip(predictions, expected, contents, strict=True):
        if verdict.deciding_mask is None:
            assert prediction["suspected"] is None
            continue
        (window,) = defense.mask_set(decode(content, "x").shape[-2:]).masks[verdict.deciding_mask]
        assert prediction["suspected"] == [
            {"top": window.top, "left": window.left, "height": window.height, "width": window.width}
        ]


def test_json_and_files_are_answered_alike(kit: Any, client: TestClient) -> None:
    contents = pictures(kit, 3)
    body = {"images": [base64.b64encode(content).decode() for content in contents], "masks": 2, "details": True}
    by_json = client.post("/v1/predict", json=body).json()
    by_files = client.post("/v1/predict", files=kit.upload(*contents), data={"masks": "2", "details": "true"}).json()
    assert by_json["predictions"] == by_files["predictions"]
    assert by_json["request_id"] != by_files["request_id"]


def test_a_request_may_choose_its_number_of_masks(kit: Any, client: TestClient) -> None:
    settings, contents = kit.toy(), pictures(kit, 6)
    for masks in (1, 2, 5):
        expected = offline(DoubleMasking(settings.model, settings.threat, masks=masks), contents)
        predictions = client.post("/v1/predict", files=kit.upload(*contents), data={"masks": masks}).json()[
            "predictions"
        ]
        assert [prediction["label"] for prediction in predictions] == [verdict.label for verdict in expected]
        assert [prediction["classifications"] for prediction in predictions] == [
            verdict.classifications for verdict in expected
        ]


def test_details_show_the_undefended_label_and_both_rounds(kit: Any, client: TestClient) -> None:
    settings, contents = kit.toy(), pictures(kit, 8)
    defense = DoubleMasking(settings.model, settings.threat, masks=3)
    images = [decode(content, "x") for content in contents]
    examined = defense.examine(images, [0] * len(images), maps=True)  # every two-mask label
    plain = client.post("/v1/predict", files=kit.upload(*contents)).json()["predictions"]
    predictions = client.post("/v1/predict", files=kit.upload(*contents), data={"details": "true"}).json()[
        "predictions"
    ]
    for prediction, bare, expected in zip(predictions, plain, examined, strict=True):
        details = prediction.pop("details")
        assert bare.pop("details") is None
        assert prediction == bare, "details must not change the answer, nor what it cost"
        assert details["undefended"]["label"] == expected.table.labels[-1]
        assert details["one_mask_labels"] == expected.table.one_mask_labels()
        assert [row["mask"] for row in details["second_round"]] == prediction["disagreers"]
        for row in details["second_round"]:
            assert row["labels"] == expected.table.row_labels(row["mask"])


def test_certificates_and_maps_are_those_of_certify(kit: Any, client: TestClient) -> None:
    settings = kit.toy()
    contents = [*pictures(kit, 4), kit.png(kit.clear_picture())]
    images = [decode(content, "x") for content in contents]
    defense = DoubleMasking(settings.model, settings.threat, masks=3)
    labels = [verdict.label for verdict in defense.predict(images)]
    expected = defense.certify(images, labels, maps=True)
    answer = client.post("/v1/certify", files=kit.upload(*contents), data={"labels": labels, "maps": "true"})
    certificates = answer.json()["certificates"]
    assert {certificate["certified"] for certificate in certificates} == {True, False}
    for certificate, proof in zip(certificates, expected, strict=True):
        assert (certificate["certified"], certificate["row_certified"]) == (proof.certified, proof.row_certified)
        assert certificate["failing_pair"] == (proof.failing_pair and list(proof.failing_pair))
        assert certificate["classifications"] == proof.classifications
        (positions,) = (proof.positions or {}).values()
        assert [[digit == "1" for digit in row] for row in certificate["maps"][0]["rows"]] == positions.tolist()
        assert certificate["proved_share"] == pytest.approx(positions.mean())


def test_a_certificate_of_fast_labels_says_that_it_is_statistical() -> None:
    proof = Certificate(1, True, True, None, None, 0.5, 45, None)
    for unconfirmed in (0, 7):
        sent = answers.certificate(replace(proof, unconfirmed=unconfirmed), 9, None, max_positions=0)
        assert sent.model_dump()["unconfirmed"] == unconfirmed


def test_maps_that_are_too_large_are_left_out_and_the_share_stays(kit: Any) -> None:
    from patchcleanser.service.config import Limits

    with TestClient(create_app(kit.toy(limits=Limits(map_positions=10)))) as client:
        answer = client.post("/v1/certify", files=kit.upload(kit.png()), data={"labels": 0, "maps": "true"})
    (certificate,) = answer.json()["certificates"]
    assert certificate["maps"] is None
    assert certificate["proved_share"] is not None


def test_no_answer_is_lost_or_swapped_between_many_clients(kit: Any, client: TestClient) -> None:
    settings = kit.toy()
    contents = pictures(kit, 48)
    expected = {k: offline(DoubleMasking(settings.model, settings.threat, masks=k), contents) for k in (2, 3)}

    def ask(number: int) -> None:
        at, masks = number % 48, 2 + number % 2
        if number % 5:
            answer = client.post("/v1/predict", files=kit.upload(contents[at]), data={"masks": masks})
            assert answer.json()["predictions"][0]["label"] == expected[masks][at].label
        else:
            answer = client.post("/v1/certify", files=kit.upload(contents[at]), data={"labels": 1})
            assert answer.json()["certificates"][0]["label"] == 1

    with ThreadPoolExecutor(16) as pool:
        list(pool.map(ask, range(240)))
    metrics = client.get("/metrics").text
    shared = float(metrics.split("patchcleanser_batch_images_sum ")[1].split()[0])
    batches = float(metrics.split("patchcleanser_batch_images_count ")[1].split()[0])
    assert shared > batches, "some batches must have held several requests"


def test_masks_and_model_say_what_is_used(kit: Any, client: TestClient) -> None:
    settings = kit.toy()
    masks = DoubleMasking(settings.model, settings.threat, masks=3).mask_set((16, 20))
    facts = client.get("/v1/masks", params={"height": 16, "width": 20}).json()
    assert [tuple(box.values()) for mask in facts["masks"] for box in mask] == [m[0].numbers for m in masks.masks]
    assert (facts["predict_classifications"], facts["certify_classifications"]) == (len(masks), len(masks.unions))
    model = client.get("/v1/model").json()
    assert model["names"] == ["moss", "rust", "salt", "tar"]
    assert (model["threat"], model["masks"], model["defense"]) == ("3x3 patch", [3, 3], "double-masking")
    assert model["fingerprint"] == settings.model.fingerprint


def test_folders_in_a_models_name_are_not_told() -> None:
    from patchcleanser.service.model import _shown

    assert _shown("onnx:/home/somebody/secret/net.onnx?weights=/etc/x") == "onnx:net.onnx"
    assert _shown("tokens:trained:/srv/models/vit") == "tokens:trained:vit"
    assert _shown("zoo:tiny") == "zoo:tiny"
    assert _shown("mirror:mean:trained:/srv/a?classes=2,onnx:/b/c.onnx") == "mirror:mean:trained:a,onnx:c.onnx"
    assert _shown("mean:timm:a?mean=0.5,0.4,0.3&weights=none,zoo:tiny") == "mean:timm:a,zoo:tiny"
    assert _shown("onnx:/home/bob/mean:v2/net.onnx") == "onnx:net.onnx"
    assert _shown("torchvision:mobilenet_v2?weights=/home/bob/mean:x/secret.pth") == "torchvision:mobilenet_v2"
    assert _shown("python:my_mean:make") == "python:my_mean:make"
