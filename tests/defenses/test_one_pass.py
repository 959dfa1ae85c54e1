"""One pass of the network for all labels: with records, report, audit, attack and service, like every other defense."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fastapi.testclient import TestClient
from PIL import Image
from torch import Tensor, nn

from patchcleanser import Job, Run, Threat, TorchClassifier, evaluate, load_classifier
from patchcleanser.attacks.patch_attack import AttackSettings
from patchcleanser.core.label_table import UNMASKED
from patchcleanser.core.masks import MaskSet
from patchcleanser.data import ArrayDataset
from patchcleanser.defenses.double_masking import DoubleMasking
from patchcleanser.defenses.one_pass import HeadEngine, OnePass
from patchcleanser.errors import InputError, OutputError, RecordError
from patchcleanser.evaluation import AttackJob
from patchcleanser.evaluation.audit import audit, audited_job
from patchcleanser.networks.bagnet import BagNet
from patchcleanser.networks.split import SplitNet
from patchcleanser.networks.visible_pooling import VisibleFeatures, VisiblePooling
from patchcleanser.records.derive import derive, row_certified
from patchcleanser.reports import write_report
from patchcleanser.reports.rederive import numbers_of
from patchcleanser.service.app import create_app
from patchcleanser.service.config import ServiceSettings

SIDE, THREAT = 16, Threat.square(3)


class ColourBag(nn.Module):
    """A convolution of 3×3 px: each place says which of four colours it sees."""

    field, jump = 3, 1

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(3, 4, 3)
        hues = torch.tensor([[1.0, -1, -1], [-1, 1, -1], [-1, -1, 1], [0.5, 0.5, -2]])
        with torch.no_grad():
            self.convolution.weight.copy_(hues[:, :, None, None].expand(4, 3, 3, 3))
            self.convolution.bias.zero_()  # type: ignore[union-attr]

    def local(self, images: Tensor) -> Tensor:
        logits: Tensor = self.convolution(images)
        return logits

    def forward(self, images: Tensor) -> Tensor:
        return self.local(images).mean((2, 3))


def colours() -> TorchClassifier:
    return TorchClassifier(VisiblePooling(ColourBag()).eval(), classes=4)


def dataset(number: int = 24) -> ArrayDataset:
    """Noise with a spot of its class's colour, from small to large: some can be certified, some cannot."""
    draw = np.random.default_rng(0)
    labels, hues = draw.integers(0, 3, number), np.eye(3, dtype=np.uint8)
    pixels = draw.integers(0, 90, (number, SIDE, SIDE, 3)).astype(np.uint8)
    for image, label, side in zip(pixels, labels, draw.integers(3, SIDE, number), strict=True):
        top, left = draw.integers(0, SIDE - side + 1, 2)
        image[top : top + side, left : left + side] += 60 * hues[label]
    return ArrayDataset("spots", pixels, labels.astype(np.int64), list("rgby"))


def images() -> list[Tensor]:
    return [dataset().image(n) for n in range(len(dataset()))]


def job(**fields: Any) -> Job:
    return Job(colours(), dataset(), THREAT, "one-pass", masks=4, **fields)


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return evaluate(job(table=True), tmp_path_factory.mktemp("one-pass"), batch=10)


def test_a_run_has_the_rows_of_certify_and_one_classification_for_each_image(stored: Run) -> None:
    rows = stored.read().to_pylist()
    certificates = OnePass(colours(), THREAT, masks=4).certify(images(), dataset().labels)
    assert [row["row_certified"] for row in rows] == [c.row_certified for c in certificates]
    assert {row["classifications"] for row in rows} == {1}
    assert {len(row["table"]) for row in rows} == {136}
    assert 5 <= sum(c.row_certified for c in certificates) <= len(rows) - 5


def test_a_stored_run_has_the_masks_of_its_defense(stored: Run) -> None:
    masks = OnePass(colours(), THREAT, masks=4).mask_set((SIDE, SIDE))
    assert stored.mask_set((SIDE, SIDE)) == masks != MaskSet.build(THREAT, image=(SIDE, SIDE), masks=4)
    assert masks.covers(THREAT)


def test_stored_tables_give_smaller_patches_maps_and_a_report(stored: Run, tmp_path: Path) -> None:
    derived = derive(stored)
    assert derived is not None
    assert row_certified(stored, THREAT).count == stored.summary().shares["row_certified"].count
    assert row_certified(stored, Threat.square(1)).count >= row_certified(stored, THREAT).count
    certificates = OnePass(colours(), THREAT, masks=4).certify(images(), dataset().labels, maps=True)
    weak = np.mean([~(c.positions or {})[3, 3] for c in certificates], axis=0)
    np.testing.assert_allclose(derived.weakness, weak)
    page = write_report([(stored, derived)], tmp_path / "report").read_text(encoding="utf-8")
    assert "one pass" in page
    assert "the labels under all masks come from a single one" in page


def test_nothing_is_said_of_defenses_that_would_see_other_labels(stored: Run) -> None:
    derived = derive(stored)
    assert derived is not None
    assert (derived.answers, derived.detection) == ({}, [])
    for other in ("double-masking", "challenger-masking", "minority-reports"):
        with pytest.raises(RecordError, match="come from one pass each"):
            numbers_of(stored, other)
    assert numbers_of(stored)["defense"] == "one-pass"


def test_an_audit_by_masked_images_one_by_one_and_an_attack_contradict_nothing(stored: Run) -> None:
    settings = AttackSettings(iterations=5, locations=2)
    result = audit(stored, audited_job(stored, colours(), dataset()), sample=6, attack=4, settings=settings)
    assert result.contradictions == []
    assert (len(result.derived), len(result.attacked)) == (6, 4)
    assert result.labels >= 6 * 137


def test_an_audit_finds_a_certificate_that_was_forged(stored: Run, tmp_path: Path) -> None:
    copy = Run.begin(tmp_path / "run", {**stored.job, "table": False}, images=24, batch=24, metadata={})
    rows = stored.read().to_pylist()
    for row in rows:
        row["table"] = None
    forged = next(row for row in rows if not row["row_certified"])
    forged["row_certified"], forged["weakest"] = True, None
    copy.write(0, rows)
    result = audit(copy, audited_job(copy, colours(), dataset()), sample=24, attack=0)
    assert [(entry["what"], entry["index"]) for entry in result.contradictions] == [("row_certified", forged["index"])]


def test_an_attack_that_knows_the_defense_fools_images_and_no_certified_one(tmp_path: Path) -> None:
    settings = AttackSettings(iterations=10, locations=2)
    rows = evaluate(AttackJob(job(), "adaptive", settings), tmp_path / "attack", batch=24).read().to_pylist()
    fooled = [row for row in rows if row["fooled"]]
    assert fooled
    assert not any(row["row_certified"] for row in fooled)


def test_the_service_answers_as_predict_does_and_certifies() -> None:
    settings = ServiceSettings(
        model=colours(), threat=THREAT, masks=4, samples=None, defense="one-pass", hosts=("testserver",)
    )
    files = [("image", (f"{n}.png", png(picture), "image/png")) for n, picture in enumerate(dataset().images[:8])]
    with TestClient(create_app(settings)) as client:
        data = {"details": "true"}
        predictions = client.post("/v1/predict", files=files, data=data).json()["predictions"]
        labels = dataset().labels[:8].tolist()
        certified = client.post("/v1/certify", files=files, data={"labels": labels}).json()
    defense = OnePass(colours(), THREAT, masks=4)
    for prediction, verdict in zip(predictions, defense.predict(images()[:8]), strict=True):
        assert (prediction["label"], prediction["case"]) == (verdict.label, verdict.case.value)
        assert prediction["classifications"] == 1
    expected = [c.row_certified for c in defense.certify(images()[:8], labels)]
    assert [entry["row_certified"] for entry in certified["certificates"]] == expected


def test_what_else_is_in_a_batch_changes_no_certificate() -> None:
    defense = OnePass(colours(), THREAT, masks=4)
    together = defense.certify(images(), dataset().labels)
    for image, label, certificate in zip(images()[:6], dataset().labels[:6], together, strict=False):
        (alone,) = defense.certify([image], [label])
        assert (alone.certified, alone.row_certified) == (certificate.certified, certificate.row_certified)


def test_images_of_different_sizes_get_masks_of_their_own() -> None:
    defense = OnePass(colours(), THREAT, masks=4)
    mixed = [torch.rand(3, 16, 16), torch.rand(3, 12, 20), torch.rand(3, 16, 16)]
    alone = [defense.predict([image])[0].label for image in mixed]
    assert [verdict.label for verdict in defense.predict(mixed)] == alone


def test_half_precision_networks_and_other_networks_are_told_what_is_needed() -> None:
    with pytest.raises(InputError, match="one pass computes exact labels only; use precision='exact'"):
        OnePass(colours(), THREAT, precision="fast")
    for spec in ("zoo:tiny", "net:bagnet", "inpaint:zoo:tiny"):
        with pytest.raises(InputError, match="pools what is visible, such as visible:net:bagnet, or has a head"):
            OnePass(load_classifier(spec, device="cpu"), THREAT)


@pytest.mark.parametrize("network", ["bagnet?width=8&depth=3", "split?width=8&depth=2&head=1&head_width=8"])
def test_resized_images_need_a_threat_on_the_input_grid(network: str) -> None:
    classifier = load_classifier(f"visible:net:{network}", device="cpu")
    with pytest.raises(InputError, match="use a threat on the input grid"):
        OnePass(classifier, THREAT).predict([torch.rand(3, 40, 40)])
    (verdict,) = OnePass(classifier, Threat.square(3, grid="input")).predict([torch.rand(3, 40, 40)])
    assert 0 <= verdict.label < 10


def test_fields_that_the_network_does_not_have_are_refused() -> None:
    network = ColourBag()
    network.jump = 2  # type: ignore[misc]
    with pytest.raises(OutputError, match=r"\(14, 14\) local logits where its receptive fields make \(7, 7\)"):
        OnePass(TorchClassifier(VisiblePooling(network).eval(), classes=4), THREAT).predict(images()[:1])
    network = ColourBag()
    network.convolution.padding = (1, 1)
    network.field = 1  # type: ignore[misc]
    with pytest.raises(InputError, match="local logits depend on more than their receptive field of 1 px"):
        OnePass(TorchClassifier(VisiblePooling(network).eval(), classes=4), THREAT).predict(images()[:1])


def headed() -> TorchClassifier:
    """A trunk that says which of four colours each 3×3 px have, and a head of two layers on all of it."""
    torch.manual_seed(0)
    stem, mixing = nn.Sequential(ColourBag().convolution, nn.ReLU()), nn.Conv2d(5, 4, 3, padding=1)
    with torch.no_grad():
        mixing.weight.mul_(0.02)
        mixing.weight[:, :4, 1, 1] += torch.eye(4)
    head = nn.Sequential(mixing, nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    network = SplitNet(BagNet(stem, [], 4, 4, votes=False), head)
    return TorchClassifier(VisibleFeatures(network).eval(), classes=4)


def headed_job(**fields: Any) -> Job:
    return Job(headed(), dataset(), THREAT, "one-pass", masks=4, **fields)


@pytest.fixture(scope="module")
def stored_with_head(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return evaluate(headed_job(table=True), tmp_path_factory.mktemp("head"), batch=10)


def test_with_a_head_a_classification_is_one_input_of_the_head(stored_with_head: Run, tmp_path: Path) -> None:
    rows = stored_with_head.read().to_pylist()
    defense = OnePass(headed(), THREAT, masks=4)
    certificates = defense.certify(images(), dataset().labels)
    assert [row["row_certified"] for row in rows] == [c.row_certified for c in certificates]
    assert {row["classifications"] for row in rows} == {137}
    assert {len(row["table"]) for row in rows} == {136}
    assert 5 <= sum(c.row_certified for c in certificates) <= len(rows) - 5
    verdicts = defense.predict(images())
    assert min(v.classifications for v in verdicts) == 16 < max(v.classifications for v in verdicts)
    page = write_report([(stored_with_head, derive(stored_with_head))], tmp_path / "report").read_text(encoding="utf-8")
    assert "its trunk looks at each image once" in page


def test_the_trunk_runs_once_for_each_image() -> None:
    defense = OnePass(headed(), THREAT, masks=4)
    assert isinstance(defense.engine, HeadEngine)
    inputs: list[int] = []
    local = defense.engine.source._local
    defense.predict(images()[:1])  # its features are looked at for receptive fields and batch shapes
    defense.engine.source._local = lambda batch: (inputs.append(len(batch)), local(batch))[1]  # type: ignore[method-assign]
    defense.engine._probed = 5  # no noise images are tried
    defense.certify(images(), dataset().labels, maps=True)
    assert sum(inputs) == len(images())


def test_rows_with_a_head_are_those_of_double_masking_with_the_same_network(stored_with_head: Run) -> None:
    defense = OnePass(headed(), THREAT, masks=4)
    slow = DoubleMasking(headed(), THREAT, mask_set=defense.mask_set((SIDE, SIDE)))
    ours, theirs = (d.examine(images(), dataset().labels, maps=True) for d in (defense, slow))
    for one, other, row in zip(ours, theirs, stored_with_head.read().to_pylist(), strict=True):
        assert (one.table.labels == other.table.labels).all()
        assert row["table"] == one.table.labels[:UNMASKED].tolist()
        np.testing.assert_allclose(one.table.margins, other.table.margins, atol=1e-5)
        assert one.certificate.row_certified == other.certificate.row_certified
        assert one.verdict.label == other.verdict.label


def test_an_audit_with_a_head_and_an_attack_contradict_nothing(stored_with_head: Run) -> None:
    settings = AttackSettings(iterations=5, locations=2)
    result = audit(
        stored_with_head, audited_job(stored_with_head, headed(), dataset()), sample=6, attack=4, settings=settings
    )
    assert result.contradictions == []
    assert (len(result.derived), len(result.attacked)) == (6, 4)


def test_an_attack_on_a_network_with_a_head_fools_images_and_no_certified_one(tmp_path: Path) -> None:
    settings = AttackSettings(iterations=10, locations=2)
    job = AttackJob(headed_job(), "adaptive", settings)
    rows = evaluate(job, tmp_path / "attack", batch=24).read().to_pylist()
    fooled = [row for row in rows if row["fooled"]]
    assert fooled
    assert not any(row["row_certified"] for row in fooled)


def test_the_service_answers_with_a_head_as_predict_does_and_certifies() -> None:
    settings = ServiceSettings(
        model=headed(), threat=THREAT, masks=4, samples=None, defense="one-pass", hosts=("testserver",)
    )
    files = [("image", (f"{n}.png", png(picture), "image/png")) for n, picture in enumerate(dataset().images[:8])]
    labels = dataset().labels[:8].tolist()
    with TestClient(create_app(settings)) as client:
        predictions = client.post("/v1/predict", files=files, data={"details": "true"}).json()["predictions"]
        certified = client.post("/v1/certify", files=files, data={"labels": labels}).json()
    defense = OnePass(headed(), THREAT, masks=4)
    for prediction, verdict in zip(predictions, defense.predict(images()[:8]), strict=True):
        assert (prediction["label"], prediction["case"]) == (verdict.label, verdict.case.value)
    expected = [c.row_certified for c in defense.certify(images()[:8], labels)]
    assert [entry["row_certified"] for entry in certified["certificates"]] == expected


def test_what_else_is_in_a_batch_changes_no_margin_with_a_head() -> None:
    defense = OnePass(headed(), THREAT, masks=4)
    together = defense.examine(images(), dataset().labels, maps=True)
    for image, label, examination in zip(images()[:6], dataset().labels[:6], together, strict=False):
        (alone,) = OnePass(headed(), THREAT, masks=4).examine([image], [label], maps=True)
        assert (alone.table.margins[:UNMASKED] == examination.table.margins[:UNMASKED]).all()  # to the last bit


def png(picture: Any) -> bytes:
    file = io.BytesIO()
    Image.fromarray(picture).save(file, format="PNG")
    return file.getvalue()
