"""Ways to a false certificate around the theorem: a classifier that is no total function, or wrong pixels.

Each was once found by a reviewer who trusted nothing.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from patchcleanser import CallableClassifier, ChallengerMasking, DoubleMasking, MinorityReports, Threat, TorchClassifier
from patchcleanser.classifiers.precision import CALIBRATION, SAFETY, Recheck, gaps, plain_float32, ties, total
from patchcleanser.errors import InputError, NotAFunctionError, OutputError


def scores(*columns: Tensor) -> Tensor:
    return torch.stack([c.float() for c in columns], 1)


def defended(function: object, side: int = 1, **options: object) -> DoubleMasking:
    return DoubleMasking(CallableClassifier(function, array="torch"), Threat.square(side), masks=2, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("poison", [torch.inf, torch.nan])
@pytest.mark.parametrize("kind", [DoubleMasking, ChallengerMasking])
def test_a_patch_cannot_silence_a_certified_image(poison: float, kind: type) -> None:
    def function(x: Tensor) -> Tensor:  # a dark pixel, wherever it is seen, drives a logit out of range
        return scores(torch.ones(len(x)), torch.where(x.amin((1, 2, 3)) <= 0, poison, 0.0))

    defense = kind(CallableClassifier(function, array="torch"), Threat.square(1), masks=2)
    image = torch.ones(1, 1, 6, 6)
    assert defense.certify(image, [0])[0].certified
    for row in range(6):
        attacked = image.clone()
        attacked[..., row, 0] = 0
        assert defense.predict(attacked)[0].label == 0


def test_a_classifier_that_never_gives_numbers_is_an_error_everywhere() -> None:
    defense = defended(lambda x: torch.full((len(x), 2), torch.nan))
    for call in (lambda: defense.predict(torch.ones(1, 1, 4, 4)), lambda: defense.certify(torch.ones(1, 1, 4, 4), [0])):
        with pytest.raises(OutputError, match="NaN or infinite logits"):
            call()


def test_certificates_are_refused_where_any_logit_is_not_a_number() -> None:
    def function(x: Tensor) -> Tensor:
        return scores(torch.ones(len(x)), torch.where(x[:, 0, 0, 0] < 0.9, torch.nan, 0.0))

    with pytest.raises(OutputError, match="NaN or infinite logits"):
        defended(function).certify(torch.ones(1, 1, 4, 4), [0])


@pytest.mark.parametrize("constant", [-torch.inf, -1e4])
def test_a_constant_logit_does_not_blind_the_probe(constant: float) -> None:
    def function(x: Tensor) -> Tensor:
        noisy = functional.dropout(x, 0.5, training=True).mean((1, 2, 3))
        return scores(noisy, 0.5 - noisy, torch.full((len(x),), constant))

    with pytest.raises(NotAFunctionError):
        defended(function).predict(torch.rand(4, 1, 8, 8))


def test_later_images_are_probed_too() -> None:
    """The first image is all mask colour, on which batch statistics do nothing."""

    def function(x: Tensor) -> Tensor:
        centred = (x - x.mean(0)).mean((1, 2, 3)) * 50
        return scores(centred, -centred)

    images = torch.full((3, 1, 8, 8), 0.5)
    images[1:] = torch.rand(2, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    defense = defended(function, chunk=4)
    with pytest.raises(NotAFunctionError):
        defense.predict(images)


def test_a_stream_that_reuses_its_buffer_is_certified_on_its_own_pixels() -> None:
    bad, good, buffer = torch.zeros(1, 6, 6), torch.ones(1, 6, 6), torch.empty(1, 6, 6)

    def stream() -> Iterator[Tensor]:
        for image in (bad, good):
            yield buffer.copy_(image)

    defense = defended(lambda x: scores(x.mean((1, 2, 3)), 1 - x.mean((1, 2, 3))))
    together = [c.certified for c in defense.certify(torch.stack([bad, good]), [0, 0])]
    assert together == [False, True]
    assert [c.certified for c in defense.certify(stream(), [0, 0])] == together


def test_a_classifier_may_reuse_its_output() -> None:
    out = np.zeros((64, 2), dtype=np.float32)

    def function(x: np.ndarray) -> np.ndarray:
        out[: len(x), 0] = x.mean((1, 2, 3))
        out[: len(x), 1] = 1 - out[: len(x), 0]
        return out[: len(x)]

    images = torch.rand(8, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    reused = DoubleMasking(CallableClassifier(function), Threat.square(1), masks=2).predict(images)
    copied = DoubleMasking(CallableClassifier(lambda x: function(x).copy()), Threat.square(1), masks=2).predict(images)
    assert reused == copied


def test_ties_are_decided_alone_whatever_the_batch() -> None:
    """A kernel that rounds differently in batches of one: certify and predict must agree all the same."""

    def function(x: Tensor) -> Tensor:
        return scores(torch.zeros(len(x)), torch.full((len(x),), 1e-7 if len(x) == 1 else -1e-7))

    for make in (DoubleMasking, ChallengerMasking):
        defense = make(CallableClassifier(function, array="torch"), Threat.square(1), masks=2)
        (verdict,) = defense.predict(torch.ones(1, 1, 6, 6))
        assert verdict.label == 1
        assert not defense.certify(torch.ones(1, 1, 6, 6), [0])[0].certified


def test_the_threat_of_a_defense_is_fixed() -> None:
    defense = defended(lambda x: scores(torch.ones(len(x)), torch.zeros(len(x))))
    with pytest.raises(AttributeError):
        defense.threat = Threat.square(4)  # type: ignore[misc]


def test_surrounding_autocast_changes_nothing() -> None:
    torch.manual_seed(0)
    model = TorchClassifier(nn.Sequential(nn.Flatten(), nn.Linear(192, 3)).eval())
    images = torch.rand(4, 3, 8, 8)
    plain = DoubleMasking(model, Threat.square(2), masks=2).certify(images, [0] * 4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = DoubleMasking(model, Threat.square(2), masks=2).certify(images, [0] * 4)
    assert [c.margin for c in plain] == [c.margin for c in inside]


def test_float32_settings_are_put_back() -> None:
    kept = torch.backends.cuda.matmul.fp32_precision
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    try:
        with plain_float32(torch.device("cpu")):
            assert torch.backends.cuda.matmul.fp32_precision == "ieee"
            with plain_float32(torch.device("cpu")):
                pass
            assert torch.backends.cuda.matmul.fp32_precision == "ieee"
        assert torch.backends.cuda.matmul.fp32_precision == "tf32"
    finally:
        torch.backends.cuda.matmul.fp32_precision = kept


def test_detection_asks_for_a_little_more_confidence_than_an_alert() -> None:
    def function(x: Tensor) -> Tensor:
        return scores(torch.full((len(x),), 1.0), torch.zeros(len(x)))

    model = CallableClassifier(function, array="torch")
    sure = float(torch.tensor([1.0, 0.0]).softmax(0)[0])
    for threshold, certified in [(sure - 1e-3, True), (sure - 1e-6, False), (sure, False)]:
        defense = MinorityReports(model, Threat.square(1), masks=2, threshold=threshold)
        assert defense.certify(torch.ones(1, 1, 4, 4), [0])[0].detection_certified == certified
    with pytest.raises(InputError, match="use precision='exact'"):
        MinorityReports(model, Threat.square(1), precision="fast")


# The bookkeeping of fast labels, which is the same on every device.


def test_no_fast_label_can_flip_above_the_bound_that_its_movement_sets() -> None:
    generator = torch.Generator().manual_seed(0)
    exact = torch.randn(4000, 5, generator=generator)
    fast = exact + 0.05 * torch.randn(4000, 5, generator=generator)
    recheck = Recheck()
    recheck.learn(fast[:CALIBRATION], exact[:CALIBRATION])
    flips = exact.argmax(1) != fast.argmax(1)
    assert flips.sum() > 50
    assert not (flips & (gaps(fast) > recheck.bound)).any()
    assert recheck.bound > SAFETY * 0.1


def test_the_bound_is_learnt_even_where_no_label_is_doubtful() -> None:
    generator = torch.Generator().manual_seed(0)
    exact = torch.randn(600, 1000, generator=generator)
    exact[:, 0] += 50  # far ahead of all others
    fast = exact + 0.05 * torch.randn(600, 1000, generator=generator)
    recheck = Recheck()
    recheck.learn(fast, exact)
    near = exact.clone()
    near[:, 0] = near[:, 1:].amax(1) + 0.01
    fast = near + 0.05 * torch.randn(600, 1000, generator=generator)
    flips = near.argmax(1) != fast.argmax(1)
    assert flips.sum() > 50
    assert not (flips & (gaps(fast) > recheck.bound)).any()


def test_the_bound_grows_with_what_is_seen_and_survives_infinities() -> None:
    recheck = Recheck()
    blank = torch.zeros(3, 2)
    recheck.learn(blank, blank)
    assert recheck.bound == 0
    recheck.learn(torch.tensor([[1.0, 0.0, -torch.inf]]), torch.tensor([[1.1, 0.0, -torch.inf]]))
    assert recheck.bound == pytest.approx(SAFETY * 0.1, rel=1e-3)
    recheck.learn(torch.tensor([[1.0, -torch.inf]]), torch.tensor([[1.0, 0.0]]))
    assert recheck.bound == torch.inf  # nothing can be trusted any more


def test_where_most_labels_are_doubtful_exact_ones_are_used() -> None:
    generator = torch.Generator().manual_seed(0)
    recheck = Recheck()
    for noise, hopeless in ((0.01, False), (3.0, True)):
        recheck.begin()
        exact = torch.randn(600, 5, generator=generator)
        fast = exact + noise * torch.randn(600, 5, generator=generator)
        recheck.sampled(600)
        recheck.learn(fast, exact)
        recheck.count(recheck.doubt(fast))
        assert recheck.hopeless == hopeless


def test_the_first_labels_and_then_a_sample_are_computed_both_ways() -> None:
    recheck = Recheck()
    first = recheck.sampled(600)
    assert first[:CALIBRATION].all()
    later = recheck.sampled(100_000)
    assert 300 < later.sum() < 480  # one in 256
    recheck.begin()
    assert torch.equal(recheck.sampled(600), first)  # a batch's sample does not depend on the batches before it
    assert recheck.labels == 101_200


@pytest.mark.parametrize(
    ("audited", "flips", "rate"), [(0, 0, 1.0), (3000, 0, 0.000998), (100, 0, 0.0295), (100, 5, 0.1023), (4, 4, 1.0)]
)
def test_the_flip_rate_has_an_exact_confidence_bound(audited: int, flips: int, rate: float) -> None:
    assert Recheck(audited=audited, audited_flips=flips).flip_rate == pytest.approx(rate, rel=1e-2)


def test_ties_and_margins_of_infinite_logits() -> None:
    raw = torch.tensor([[torch.nan, 1.0], [torch.inf, 1.0], [-torch.inf, -torch.inf], [1.0, 1.0 + 1e-7], [3.0, 1.0]])
    logits = total(raw)
    assert logits.argmax(1).tolist() == [1, 0, 0, 0, 0] or logits.argmax(1).tolist()[:3] == [1, 0, 0]
    assert gaps(logits)[2] == 0
    assert ties(logits, torch.float32).tolist() == [False, False, True, True, False]
