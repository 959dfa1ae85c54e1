"""The paper's shapes: checks that hold for such numbers, and fail for others."""

from __future__ import annotations

import pytest

from patchcleanser.paper import EXPERIMENTS, Measurement, PaperRow
from patchcleanser.paper.pages import Section
from patchcleanser.records.metrics import Proportion


def rows_of(name: str, model: str = "tiny") -> list[PaperRow]:
    return [row for row in EXPERIMENTS[name].rows if row.spec.model == model]


def measured(name: str, measure: str, values: list[float], more: str | None = None) -> dict[str, Measurement]:
    """Measurements of an experiment's first rows: shares of 1,000 images, and another measure that stays at 90%."""
    return {
        row.key: Measurement(
            {measure: Proportion(round(10 * value), 1000), **({more: Proportion(900, 1000)} if more else {})}, 1000, {}
        )
        for row, value in zip(rows_of(name), values, strict=False)
    }


@pytest.mark.parametrize(
    ("values", "word"),
    [([40, 50, 55, 57, 58], "yes"), ([58, 57, 55, 50, 40], "NO"), ([40, 41, 42, 50, 70], "NO")],
)
def test_certified_accuracy_must_rise_and_saturate(values: list[float], word: str) -> None:
    (text,) = Section(EXPERIMENTS["figure4"], measured("figure4", "certified", values, "clean")).claims
    assert f"saturates: {word} for tiny, cifar10, source" in text
    assert f"{values[0]:.1f} at 2" in text


@pytest.mark.parametrize(("last", "word"), [(88.0, "yes"), (86.0, "NO")])
def test_over_estimation_may_cost_three_points_of_clean_accuracy(last: float, word: str) -> None:
    first = Section(EXPERIMENTS["figure6"], measured("figure6", "clean", [90, 90, 89, 89, 89, last])).claims[0]
    assert f": {word} for" in first


@pytest.mark.parametrize(("values", "word"), [([60, 50, 30, 20, 10, 5, 0], "yes"), ([60, 50, 30, 40, 10, 5, 0], "NO")])
def test_certified_accuracy_must_fall_with_larger_patches(values: list[float], word: str) -> None:
    (text,) = Section(EXPERIMENTS["figure8"], measured("figure8", "certified", values)).claims
    assert f": {word} for" in text


def test_detection_must_certify_more_than_recovery() -> None:
    double, *rest = rows_of("figure9")
    for recovered, word in ((60, "yes"), (80, "NO")):
        measurements = {double.key: Measurement({"certified": Proportion(recovered, 100)}, 100, {})}
        measurements |= {
            row.key: Measurement({"detection_certified": Proportion(70, 100)}, 100, {}) for row in rest[:3]
        }
        (text,) = Section(EXPERIMENTS["figure9"], measurements).claims
        assert f": {word} for" in text


def test_cutout_must_help_every_network_that_has_a_vanilla_twin() -> None:
    twins = ("cifar10-resnet", "cifar10-resnet-vanilla")
    rows = [row for row in EXPERIMENTS["table5"].rows if row.spec.model in twins]
    assert len(rows) == 2
    for masked, word in ((76, "yes"), (30, "NO")):
        shares = {"with cutout": masked, "vanilla": 40}
        measurements = {
            row.key: Measurement({"certified": Proportion(shares[row.variant], 100)}, 100, {}) for row in rows
        }
        (text,) = Section(EXPERIMENTS["table5"], measurements).claims
        assert f"family: {word} for cifar10, source (certified cifar10-resnet 40.0 to {masked:.1f})" in text


def test_a_network_that_learnt_longer_is_no_twin() -> None:
    models = ("resnet", "cifar10-resnet-vanilla", "cifar10-resnet50-128-longer", "cifar10-resnet50-128-vanilla")
    rows = [row for row in EXPERIMENTS["table5"].rows if row.spec.model in models]
    assert len(rows) == len(models)
    measurements = {row.key: Measurement({"certified": Proportion(50, 100)}, 100, {}) for row in rows}
    assert Section(EXPERIMENTS["table5"], measurements).claims == []


@pytest.mark.parametrize(("large", "word"), [(9, "yes"), (1, "NO")])
def test_larger_objects_must_be_certified_more_often_whatever_a_bucket_without_images_says(
    large: int, word: str
) -> None:
    rows = rows_of("figure20", "imagenet-mobilenet-hardened")
    shares = [
        Proportion(3, 10),
        Proportion(0, 0),
        *(Proportion(2, 10) for _ in range(3)),
        *(Proportion(large, 20) for _ in range(5)),
    ]
    measurements = {
        row.key: Measurement({"certified": share}, 180, {}) for row, share in zip(rows, shares, strict=True)
    }
    (text,) = Section(EXPERIMENTS["figure20"], measurements).claims
    assert f"picture: {word} for" in text
    assert f"certified 22.5 up to 50 and {5.0 * large:.1f} beyond, of 40 and 100 images" in text


def test_nothing_is_claimed_of_what_was_not_measured() -> None:
    for experiment in EXPERIMENTS.values():
        assert Section(experiment, {}).claims == []
    assert Section(EXPERIMENTS["figure4"], measured("figure4", "certified", [40, 50])).claims == []
