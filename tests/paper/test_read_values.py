"""What is read off a run equals what its rows say when counted by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from patchcleanser import CallableClassifier, Job, MinorityReports, Run, Threat, evaluate
from patchcleanser.data import ArrayDataset
from patchcleanser.paper import measurements
from patchcleanser.paper.experiments import MASKING
from patchcleanser.paper.objects import BUCKETS
from patchcleanser.records.metrics import Proportion

CLASSES = ("a", "b", "c")


def linear() -> CallableClassifier:
    weights = torch.randn(3, 3 * 8 * 8, generator=torch.Generator().manual_seed(0))
    return CallableClassifier(lambda x: 9 * x.flatten(1) @ weights.T, array="torch", fingerprint="linear")


def noise(number: int = 60) -> ArrayDataset:
    draw = np.random.default_rng(0)
    pixels = draw.integers(0, 256, (number, 8, 8, 3), dtype=np.uint8)
    images = torch.from_numpy(pixels).permute(0, 3, 1, 2).float() / 255
    labels = linear().logits(images).argmax(1).numpy()  # so that some are certified
    return ArrayDataset("noise", pixels, labels.astype(np.int64), CLASSES)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    job = Job(linear(), noise(), Threat.square(2), masks=3, table=True)
    run = evaluate(job, tmp_path_factory.mktemp("run"))
    certified = run.read(["certified"])["certified"].to_pylist()
    assert 5 < sum(certified) < 55  # or the tests below would show nothing
    return run


def test_accuracies_are_the_shares_of_the_rows(run: Run) -> None:
    rows = run.read().to_pylist()
    values = measurements.accuracies(run)
    assert values["certified"] == Proportion(sum(row["certified"] for row in rows), 60)
    assert values["undefended"] == Proportion(60, 60)
    assert values["classifications"] == 46  # 9 masks make 45 unions, and one label is the undefended one's


def test_both_defenses_follow_from_the_same_tables(run: Run) -> None:
    double, challenger = (measurements.recovery_defense(run, name) for name in ("double-masking", "challenger-masking"))
    assert double["clean"] == measurements.accuracies(run)["clean"]
    assert double["certified"] == challenger["certified"]
    assert isinstance(double["classifications"], float)
    assert isinstance(challenger["classifications"], float)
    assert challenger["classifications"] <= double["classifications"]


@pytest.mark.parametrize("threshold", ["0.00", "0.50", "0.95"])
def test_thresholds_give_what_the_detecting_defense_says(run: Run, threshold: str) -> None:
    data = noise()
    defense = MinorityReports(linear(), Threat.square(2), masks=3, threshold=float(threshold))
    certificates = defense.certify([data.image(n) for n in range(60)], data.labels)
    want = sum(certificate.detection_certified for certificate in certificates)
    assert measurements.minority_reports(run, threshold)["detection_certified"] == Proportion(want, 60)


def test_recovery_stands_beside_detection(run: Run) -> None:
    assert measurements.minority_reports(run, MASKING) == measurements.accuracies(run)


def test_classes_are_ordered_from_the_least_to_the_most_certified(run: Run) -> None:
    rows = run.read(["label", "certified"]).to_pylist()
    per_class = sorted(np.mean([row["certified"] for row in rows if row["label"] == y]) for y in range(3))
    got = [measurements.class_quantile(run, part)["certified"] for part in measurements.QUANTILES]
    shares = [share.percent / 100 for share in got if isinstance(share, Proportion)]
    assert [shares[0], shares[2], shares[-1]] == pytest.approx(per_class)


def test_buckets_of_object_sizes_hold_each_image_once(run: Run) -> None:
    rows = run.read(["id", "certified"]).to_pylist()
    shares = {row["id"]: (n + 1) / 60 for n, row in enumerate(rows)}  # from 1/60 to the whole picture
    certified = [measurements.object_size(run, bucket, shares)["certified"] for bucket in BUCKETS]
    assert sum(share.total for share in certified if isinstance(share, Proportion)) == 60
    first = [row["certified"] for row in rows if shares[row["id"]] <= 0.1]
    assert certified[0] == Proportion(sum(first), len(first))
    assert measurements.object_size(run, BUCKETS[0], {})["certified"] == Proportion(
        0, 0
    )  # images without boxes are in none
