"""Accuracies in memory equal those of a run, for every defense and however the batches are cut."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from patchcleanser import (
    CallableClassifier,
    CertifiedAccuracy,
    DoubleMasking,
    Job,
    MinorityReports,
    Run,
    Threat,
    evaluate,
    load_classifier,
    load_dataset,
)
from patchcleanser.data import chosen
from patchcleanser.defenses import DEFENSES
from patchcleanser.errors import ImageError, InputError, LabelError, PatchCleanserError

SAMPLE = chosen(load_dataset("sample"), 6)
MODELS = {
    "cbn": "net:bagnet",
    "pg-bn": "net:bagnet",
    "bagcert": "net:bagnet",
    "ibp": "net:interval",
    "patchguard++": "net:bagnet",
    "one-pass": "visible:net:bagnet?width=16&depth=3",
}


def metric_of(name: str, tmp_path: Path) -> tuple[CertifiedAccuracy, Run]:
    """A metric, and a run of the same job."""
    masks: dict[str, Any] = {"masks": 2} if name.endswith(("masking", "reports", "pass")) else {}
    job = Job(load_classifier(MODELS.get(name, "zoo:tiny"), device="cpu"), SAMPLE, "3", name, **masks)
    return CertifiedAccuracy(job.built), evaluate(job, tmp_path)


@pytest.mark.parametrize("name", DEFENSES)
def test_a_loader_gives_the_accuracies_of_a_run(name: str, tmp_path: Path) -> None:
    metric, run = metric_of(name, tmp_path)
    total = metric.score(DataLoader(SAMPLE, batch_size=4))  # type: ignore[arg-type]
    expected = run.summary()
    assert total.shares == expected.shares
    assert (total.images, total.cases) == (6, expected.cases)
    assert total.classifications == expected.classifications


def small() -> CertifiedAccuracy:
    return CertifiedAccuracy(DoubleMasking(load_classifier("zoo:tiny", device="cpu"), "3", masks=2))


IMAGES = torch.stack([SAMPLE.image(n) for n in range(6)])
LABELS = torch.from_numpy(SAMPLE.labels)


def test_a_call_gives_the_batch_and_compute_gives_all_batches_since_the_reset() -> None:
    metric = small()
    first, second = metric(IMAGES[:2], LABELS[:2]), metric(IMAGES[2:], LABELS[2:])
    assert (first.images, second.images) == (2, 4)
    assert metric.compute().shares == (first + second).shares
    metric.reset()
    metric.update(IMAGES, LABELS)
    assert metric.compute().shares == (first + second).shares


def test_summaries_print_accuracies_on_one_line() -> None:
    text = repr(small()(IMAGES, LABELS))
    assert text.startswith("Summary(images=6, undefended=")
    assert "certified=" in text
    assert len(text) < 140


WRONG: dict[str, tuple[Any, type[PatchCleanserError], str]] = {
    "no images yet": (lambda: small().compute(), InputError, "call update"),
    "a classifier": (lambda: CertifiedAccuracy(load_classifier("zoo:tiny")), InputError, "DoubleMasking"),  # type: ignore[arg-type]
    "a class": (lambda: CertifiedAccuracy(DoubleMasking), InputError, "DoubleMasking"),  # type: ignore[arg-type]
    "images without labels": (lambda: small().score([IMAGES]), InputError, r"\(images, labels\)"),
    "no batches": (lambda: small().score(5), InputError, "DataLoader"),  # type: ignore[arg-type]
    "an empty loader": (lambda: small().score([]), InputError, "no images"),
    "an empty batch": (lambda: small().update(IMAGES[:0], []), ImageError, "at least 1 image"),
    "normalised images": (lambda: small().update(IMAGES * 4 - 2, LABELS), ImageError, "normalised by the classifier"),
    "one-hot labels": (lambda: small().update(IMAGES, torch.eye(6)), LabelError, "argmax"),
    "too few labels": (lambda: small().update(IMAGES, LABELS[:2]), LabelError, "2 labels for 6 images"),
}


@pytest.mark.parametrize(("call", "kind", "message"), WRONG.values(), ids=WRONG)
def test_wrong_arguments_are_one_sentence(call: Any, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        call()


def test_an_alert_on_a_clean_image_counts_as_wrong() -> None:
    def corner(x: torch.Tensor) -> torch.Tensor:
        bright = 40 * (x[:, 0, 0, 0] - 0.75)
        return torch.stack([-bright, bright], 1)

    image = torch.full((1, 3, 8, 8), 0.5)
    image[:, :, 0, 0] = 1
    defense = MinorityReports(CallableClassifier(corner, array="torch"), Threat.square(2), masks=3)
    shares = CertifiedAccuracy(defense)(image, [1]).shares
    assert [shares[name].count for name in ("undefended", "clean", "alerts", "detection_certified")] == [1, 0, 1, 0]


class Fast(DoubleMasking):
    """Certificates as fast labels give them: some rest on labels of lower precision."""

    def examine(self, *arguments: Any, **options: Any) -> list[Any]:
        results = super().examine(*arguments, **options)
        return [replace(result, certificate=replace(result.certificate, unconfirmed=3)) for result in results]


def test_certificates_that_are_no_proofs_are_counted_and_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    exact, fast = (CertifiedAccuracy(kind(small().defense.classifier, "3", masks=2)) for kind in (DoubleMasking, Fast))
    for metric in (exact, fast):
        metric.update(IMAGES, SAMPLE.labels)
        metric.update(IMAGES, SAMPLE.labels)
    assert exact.statistical == 0
    assert fast.statistical == fast.compute().shares["row_certified"].count > 0
    (record,) = caplog.records
    assert "statistical, no proofs" in record.message
    fast.reset()
    assert fast.statistical == 0
