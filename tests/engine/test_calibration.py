"""Calibration: the sample that backends are compared on, and how few labels are computed twice."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from engine.small_networks import make_classifier, photos
from patchcleanser import DoubleMasking, Job, Threat, load_classifier, load_dataset
from patchcleanser.engine.exact import top2_margin
from patchcleanser.engine.fast.backends import half_type
from patchcleanser.engine.fast.calibration import SAMPLE, closest_calls, draw_sample
from patchcleanser.evaluation.jobs import CertifyWorkload
from patchcleanser.evaluation.workloads import Batch

needs_half = pytest.mark.skipif(not half_type(torch.device("cpu")), reason="this CPU has no bfloat16 instructions")


@needs_half
def test_fast_labels_equal_exact_ones_and_most_are_not_computed_twice() -> None:
    sample = load_dataset("sample")
    images = [sample.image(i) for i in range(0, 300, 25)]
    tables = {}
    for precision in ("exact", "fast"):
        defense = DoubleMasking(
            load_classifier("zoo:tiny", device="cpu"), Threat.square(5), masks=4, precision=precision
        )
        assert sample.labels is not None
        examined = defense.examine(images, sample.labels[::25], maps=True)
        tables[precision] = np.stack([e.table.labels for e in examined])
    assert (tables["exact"] == tables["fast"]).all()
    stats = defense.engine.stats
    assert tables["fast"].size - stats.labels >= SAMPLE  # those learnt from were exact
    assert 0 < stats.rechecked < stats.labels / 2
    assert sum(e.table.rechecked for e in examined) == stats.rechecked
    assert sum(e.table.flipped for e in examined) == stats.flipped


@needs_half
def test_what_is_rechecked_in_a_batch_does_not_depend_on_the_batches_before() -> None:
    sample = load_dataset("sample")
    jobs = [
        Job(load_classifier("zoo:tiny", device="cpu"), sample, Threat.square(5), masks=2, precision="fast", table=True)
        for _ in range(2)
    ]
    alone, continued = map(CertifyWorkload, jobs)
    early, late = Batch(0, range(8)), Batch(1, range(8, 12))
    continued.process(early, continued.read(early))
    rows = alone.process(late, alone.read(late)), continued.process(late, continued.read(late))
    for first, second in zip(*rows, strict=True):
        assert first["margin"] == second["margin"]
        assert first["rechecked"] == second["rechecked"]


def test_close_calls_are_the_closest_of_the_pool() -> None:
    defense = DoubleMasking(make_classifier(), Threat.square(5), masks=3, precision="fast")
    (group,) = defense._groups(photos(24))
    sample, pool = draw_sample(group, np.random.default_rng(0))
    pairs = [{(s, u) for s, u in zip(part.which, part.unions, strict=True)} for part in (sample, pool)]
    assert not pairs[0] & pairs[1]
    with torch.inference_mode():
        logits = defense.engine.exact.logits(pool)
    margins = top2_margin(logits)
    chosen = closest_calls(pool, [logits])
    margin_of = {(s, u): margin for s, u, margin in zip(pool.which, pool.unions, margins.tolist(), strict=True)}
    most = max(margin_of[pair] for pair in zip(chosen.which, chosen.unions, strict=True))
    assert len(chosen) == len(pool) // 4
    assert sum(margin <= most for margin in margin_of.values()) == len(chosen)


def test_every_size_of_image_is_in_the_sample() -> None:
    defense = DoubleMasking(load_classifier("zoo:tiny", device="cpu"), Threat.square(5), masks=3, precision="fast")
    few, many = torch.rand(3, 40, 40), torch.rand(3, 32, 32)
    states = [defense.image_state(image) for image in [few, *[many] * 599]]
    for ordered in (states, states[::-1]):
        sample, _ = draw_sample(ordered, np.random.default_rng(0))
        assert {tuple(ordered[s].pixels.shape) for s in sample.which} == {(3, 40, 40), (3, 32, 32)}
        assert SAMPLE // 2 <= len(sample) <= SAMPLE // 2 + 2
