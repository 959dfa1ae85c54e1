"""What is derived from stored tables equals what the defenses say with the model at hand."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from patchcleanser import (
    CallableClassifier,
    ChallengerMasking,
    DoubleMasking,
    MinorityReports,
    Threat,
)
from patchcleanser.data import ArrayDataset
from patchcleanser.errors import RecordError
from patchcleanser.evaluation import Job, evaluate
from patchcleanser.records.derive import Derived, derive, detection, row_certified, unproved_corners, verdicts
from patchcleanser.records.run import Run


def shaky() -> CallableClassifier:
    """Labels that change under many masks, so that every case occurs."""
    weights = torch.randn(5, 3 * 12 * 12, generator=torch.Generator().manual_seed(1))
    return CallableClassifier(lambda x: x.flatten(1) @ weights.T, array="torch", fingerprint="shaky")


def images(number: int = 30) -> ArrayDataset:
    draw = np.random.default_rng(0)
    pixels = draw.integers(0, 256, (number, 12, 12, 3), dtype=np.uint8)
    labels = shaky().logits(torch.from_numpy(pixels).permute(0, 3, 1, 2).float() / 255).argmax(1).numpy()
    return ArrayDataset("noise", pixels, labels.astype(np.int64), [str(k) for k in range(5)])


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Run:
    job = Job(shaky(), images(), Threat.square(3), masks=3, table=True)
    return evaluate(job, tmp_path_factory.mktemp("run"), batch=7)


def derived(run: Run) -> Derived:
    result = derive(run)
    assert result is not None
    return result


def tensors(data: ArrayDataset) -> list[torch.Tensor]:
    return [data.image(i) for i in range(len(data))]


@pytest.mark.parametrize(
    ("name", "kind"), [("double-masking", DoubleMasking), ("challenger-masking", ChallengerMasking)]
)
def test_other_defenses_follow_from_the_table(
    stored: Run, name: str, kind: type[DoubleMasking | ChallengerMasking]
) -> None:
    data = images()
    live = kind(shaky(), Threat.square(3), masks=3).predict(tensors(data))
    assert len({v.case for v in live}) > 1  # otherwise the test shows nothing
    share, _ = verdicts(stored, name)
    assert share.count == sum(v.label == y for v, y in zip(live, data.labels, strict=True))


@pytest.mark.parametrize("side", [1, 2, 3])
def test_smaller_patches_are_certified_as_by_a_defense_with_the_same_masks(stored: Run, side: int) -> None:
    data = images()
    masks = stored.mask_set((12, 12))
    live = DoubleMasking(shaky(), Threat.square(side), mask_set=masks).certify(tensors(data), data.labels)
    assert row_certified(stored, Threat.square(side)).count == sum(c.row_certified for c in live)


def test_a_larger_patch_than_the_masks_cover_is_refused(stored: Run) -> None:
    with pytest.raises(ValueError, match="does not cover the threat"):
        row_certified(stored, Threat.square(4))


def test_a_patch_on_the_other_pixel_grid_is_refused(stored: Run) -> None:
    assert row_certified(stored, Threat.square(2)).total == 30
    with pytest.raises(RecordError, match="lie on the source grid, the threat on the input grid"):
        row_certified(stored, Threat.square(2, grid="input"))


def test_the_map_of_weak_places_is_the_mean_of_the_certificates_maps(stored: Run) -> None:
    data = images()
    live = DoubleMasking(shaky(), Threat.square(3), masks=3).certify(tensors(data), data.labels, maps=True)
    maps = np.stack([c.positions[(3, 3)] for c in live if c.positions is not None])
    weakness = derived(stored).weakness
    assert np.allclose(weakness, 1 - maps.mean(axis=0))
    assert 0 < weakness.mean() < 1


@pytest.mark.parametrize("threshold", [0.0, 0.4, 0.9])
def test_minority_reports_follow_at_every_threshold(stored: Run, threshold: float) -> None:
    data = images()
    live = MinorityReports(shaky(), Threat.square(3), masks=3, threshold=threshold)
    certified = live.certify(tensors(data), data.labels)
    predicted = live.predict(tensors(data))
    (point,) = detection(stored, [threshold])
    assert point.detection_certified.count == sum(c.detection_certified for c in certified)
    assert point.alerts.count == sum(v.alert for v in predicted)
    assert point.clean.count == sum(not v.alert and v.label == y for v, y in zip(predicted, data.labels, strict=True))


def test_images_of_different_sizes_share_one_map(tmp_path: Path) -> None:
    from patchcleanser.data.dataset import Dataset

    class Mixed(Dataset):
        name, classes, labels = "mixed", ("a", "b"), np.zeros(4, dtype=np.int64)

        def __len__(self) -> int:
            return 4

        def image(self, index: int) -> torch.Tensor:
            return torch.full((3, 12 + index % 2, 12), 0.1)

        def id(self, index: int) -> str:
            return str(index)

        def content(self, index: int) -> bytes:
            return bytes([index])

    dark = CallableClassifier(
        lambda x: torch.stack([1 - x.mean((1, 2, 3)), x.mean((1, 2, 3))], 1), array="torch", fingerprint="dark"
    )
    run = evaluate(Job(dark, Mixed(), Threat.square(3), masks=2, table=True), tmp_path)
    assert derived(run).weakness.shape == (64, 64)
    assert derived(run).answers["double-masking"][0].count == 4


def test_without_a_table_nothing_is_derived(tmp_path: Path) -> None:
    run = evaluate(Job(shaky(), images(4), Threat.square(3), masks=2), tmp_path)
    assert derive(run) is None
    with pytest.raises(RecordError, match="certify with --table"):
        verdicts(run, "double-masking")


def test_the_unproved_places_of_an_image_are_those_that_no_good_mask_hides(stored: Run) -> None:
    masks, threat = stored.mask_set((12, 12)), Threat.square(3)
    shares = derived(stored).unproved
    rows = stored.read(["index", "label", "table", "row_certified"]).to_pylist()
    assert {*shares} == {row["index"] for row in rows}
    for row in rows:
        good = ~(np.array(row["table"]) != row["label"])[masks.unions.index].any(axis=1)
        hidden = masks.hidden_positions(threat, good)[3, 3]
        assert (unproved_corners(stored, row["index"]) == ~hidden).all()
        assert shares[row["index"]] == pytest.approx((~hidden).mean())
        assert (shares[row["index"]] == 0) == row["row_certified"]
    assert len({*shares.values()}) > 2  # otherwise the test shows nothing
