"""Ways to a false certificate around the theorem: a classifier that is no total function, or wrong pixels.

Each was once found by a reviewer who trusted nothing.
"""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from patchcleanser import (
    CallableClassifier,
    ChallengerMasking,
    DoubleMasking,
    MinorityReports,
    Threat,
    TorchClassifier,
    load_classifier,
    load_dataset,
)
from patchcleanser.engine.exact import sanitize, top2_margin
from patchcleanser.engine.fast.backends import Backend, half_type
from patchcleanser.engine.fast.calibration import SAMPLE, Calibration, ErrorBounds
from patchcleanser.engine.fast.cascade import AUDIT
from patchcleanser.engine.float32 import cudnn_benchmark, strict_float32
from patchcleanser.engine.masking import LabelRequest
from patchcleanser.errors import InputError, NotAFunctionError, OutputError
from patchcleanser.records.metrics import error_rate_bound

HALF = torch.finfo(torch.float16).eps


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


@pytest.mark.parametrize("by", ["size", "row"])
@pytest.mark.parametrize("make", [DoubleMasking, ChallengerMasking])
def test_a_kernel_that_rounds_by_the_batch_or_the_row_decides_nothing(make: type, by: str) -> None:
    """However far it rounds: every masked image is at one row of batches of one size, in certify and in predict."""

    def function(x: Tensor) -> Tensor:
        seed = len(x) if by == "size" else 1
        rounding = torch.randn(len(x), generator=torch.Generator().manual_seed(seed))
        return scores(torch.zeros(len(x)), x.mean((1, 2, 3)) + 10 * rounding.expand(len(x)))

    def defense() -> Any:
        return make(CallableClassifier(function, array="torch"), Threat.square(1), masks=2)

    images = torch.rand(9, 1, 6, 6, generator=torch.Generator().manual_seed(0))
    together = [verdict.label for verdict in defense().predict(images)]
    assert [defense().predict(image[None])[0].label for image in images] == together
    margins = [c.margin for c in defense().certify(images, together, maps=True)]
    assert [defense().certify(images[i : i + 1], together[i : i + 1], maps=True)[0].margin for i in range(9)] == margins


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


def test_batches_are_the_same_whether_the_number_of_classes_is_known_or_not() -> None:
    batches: list[int] = []

    def function(x: torch.Tensor) -> torch.Tensor:
        batches.append(len(x))
        return scores(x.sum((1, 2, 3)), torch.ones(len(x)))

    sizes, images = [], torch.rand(3, 1, 6, 6, generator=torch.Generator().manual_seed(0))
    for classes in (None, 2):
        batches.clear()
        classifier = CallableClassifier(function, array="torch", classes=classes)
        DoubleMasking(classifier, Threat.square(1), masks=2).certify(images, [0] * 3)
        sizes.append(list(batches))
    assert sizes[0] == [4, *sizes[1]]  # kernels round by batch, and rows must not depend on what ran before
    assert set(sizes[1]) == {4}


def test_float32_settings_are_put_back() -> None:
    precision = torch.backends.cuda.matmul.fp32_precision
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    try:
        with strict_float32(torch.device("cpu")):
            assert torch.backends.cuda.matmul.fp32_precision == "ieee"
            with strict_float32(torch.device("cpu")):
                pass
            assert torch.backends.cuda.matmul.fp32_precision == "ieee"
        assert torch.backends.cuda.matmul.fp32_precision == "tf32"
    finally:
        torch.backends.cuda.matmul.fp32_precision = precision


def test_recurrent_layers_are_strict_float32_too() -> None:
    with strict_float32(torch.device("cpu")):
        assert {torch.backends.cudnn.rnn.fp32_precision, torch.backends.mkldnn.rnn.fp32_precision} == {"ieee"}


FOLLOWING = """
import torch
from patchcleanser.engine.float32 import strict_float32
backends = torch.backends
rooms = [backends.cuda.matmul, backends.cudnn.conv, backends.cudnn.rnn, backends.mkldnn.matmul]
backends.fp32_precision = "tf32"
with strict_float32(torch.device("cpu")):
    assert [room.fp32_precision for room in rooms] == ["ieee"] * 4
assert [room.fp32_precision for room in rooms] == ["tf32"] * 4
backends.fp32_precision = "ieee"
assert [room.fp32_precision for room in rooms] == ["ieee"] * 4
"""


def test_a_setting_that_followed_a_wider_one_follows_it_again() -> None:
    done = subprocess.run([sys.executable, "-c", FOLLOWING], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr  # in a process of its own, whose settings nobody needs afterwards


@pytest.mark.parametrize("first", [0, 1])
def test_settings_are_put_back_in_whichever_order_threads_leave(first: int) -> None:
    assert not torch.backends.cudnn.benchmark
    contexts = [cudnn_benchmark(torch.device("cuda")), strict_float32(torch.device("cpu"))]
    for context in (contexts[first], contexts[1 - first]):
        context.__enter__()
    assert not torch.backends.cudnn.benchmark  # what one thread tries must not choose another's kernels
    for context in (contexts[first], contexts[1 - first]):
        context.__exit__(None, None, None)
    assert not torch.backends.cudnn.benchmark


def test_detection_is_certified_above_the_threshold_and_not_at_it() -> None:
    def function(x: Tensor) -> Tensor:
        return scores(torch.full((len(x),), 1.0), torch.zeros(len(x)))

    model = CallableClassifier(function, array="torch")
    confidence = float(torch.tensor([1.0, 0.0]).softmax(0)[0])
    for threshold, certified in [(confidence - 1e-3, True), (confidence - 1e-6, True), (confidence, False)]:
        defense = MinorityReports(model, Threat.square(1), masks=2, threshold=threshold)
        assert defense.certify(torch.ones(1, 1, 4, 4), [0])[0].detection_certified == certified
    with pytest.raises(InputError, match="use precision='exact'"):
        MinorityReports(model, Threat.square(1), precision="fast")


# The bookkeeping of fast labels, which is the same on every device.


def noisy(noise: float, classes: int = 5, number: int = 4000) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    exact = torch.randn(number, classes, generator=generator)
    return exact, exact + noise * torch.randn(number, classes, generator=generator)


def test_labels_that_flip_are_doubtful() -> None:
    exact, fast = noisy(0.05)
    bounds = ErrorBounds(fast[:SAMPLE], exact[:SAMPLE], HALF)
    flips = exact.argmax(1) != fast.argmax(1)
    assert flips.sum() > 50
    assert not (flips & ~bounds.uncertain(fast)).any()
    assert not bounds.uncertain(fast).all()


def test_what_is_doubtful_is_learnt_even_where_no_label_is() -> None:
    exact, fast = noisy(0.05, classes=1000, number=600)
    ahead = torch.zeros(1000)
    ahead[0] = 50
    bounds = ErrorBounds(fast + ahead, exact + ahead, HALF)
    near = exact.clone()
    near[:, 0] = near[:, 1:].amax(1) + 0.01
    fast = near + 0.05 * torch.randn(600, 1000, generator=torch.Generator().manual_seed(1))
    flips = near.argmax(1) != fast.argmax(1)
    assert flips.sum() > 50
    assert not (flips & ~bounds.uncertain(fast)).any()


def test_classes_that_move_together_are_told_apart_and_others_are_not() -> None:
    """What counts is how far two classes move against each other, not how far each moves."""
    generator = torch.Generator().manual_seed(0)
    exact, shared = torch.randn(SAMPLE, 4, generator=generator), torch.randn(SAMPLE, 1, generator=generator)
    together = torch.tensor([[1.0, 1.0, 0.0, -1.0]])
    exact[:, :2] += 20  # the first two of every label are these
    bounds = ErrorBounds(exact - shared.clamp(-1, 1) * together, exact, HALF)
    close = torch.tensor([[9.0, 8.5, 0.0, 0.0], [9.0, 0.0, 8.5, 0.0], [0.0, 0.0, 9.0, 7.5], [9.0, 0.0, 0.0, 5.5]])
    assert bounds.uncertain(close).tolist() == [False, True, True, True]
    assert bounds.uncertain(torch.tensor([[9.0, 8.5, 6.0, 4.0]])).tolist() == [
        False
    ]  # 3 and 5 behind; they move by 1 and 2


def test_what_the_first_two_of_a_label_moved_counts_for_all_classes() -> None:
    """Of most pairs of classes no sample holds a close call, and close calls move most."""
    exact = torch.tensor([[9.0, 8.0, 0.0, 0.0]]).repeat(100, 1)
    bounds = ErrorBounds(exact + torch.tensor([0.5, -0.5, 0.0, 0.0]), exact, HALF)
    assert bounds.uncertain(torch.tensor([[0.0, 0.0, 9.0, 7.1], [0.0, 0.0, 9.0, 6.9]])).tolist() == [True, False]


def test_labels_that_move_further_than_any_was_thought_to_are_noticed_and_learnt() -> None:
    exact, fast = noisy(0.05)
    bounds = ErrorBounds(fast[:SAMPLE], exact[:SAMPLE], HALF)
    assert not bounds.exceeded(fast, exact).any()
    clear = torch.tensor([[4.0, 1.0, 0.0, 0.0, 0.0]])
    assert not bounds.uncertain(clear).any()
    assert not bounds.exceeded(clear, clear - 5).any()  # nothing gained on anything
    moved = clear + torch.tensor([0.0, 0.0, 0.0, 2.0, 0.0])
    assert bounds.exceeded(clear, moved).all()
    before = bounds.uncertain_share
    bounds.widen(clear, moved)
    assert bounds.uncertain_share > before
    assert bounds.uncertain(clear).all()
    never = torch.tensor([[4.0, 1.0, 0.0, 0.0, -torch.inf]])
    assert not bounds.exceeded(never, never).any()
    assert bounds.exceeded(never, clear).all()


def test_half_precision_is_never_trusted_beyond_its_digits() -> None:
    blank = torch.zeros(600, 2)
    bounds = ErrorBounds(blank, blank, HALF)  # images that half precision represents exactly teach nothing
    assert bounds.uncertain(torch.tensor([[100.0, 99.9]])).all()
    assert not bounds.uncertain(torch.tensor([[100.0, 99.0]])).any()


def test_infinite_logits_are_doubtful_only_where_they_move() -> None:
    fixed = torch.tensor([[1.0, 0.0, -torch.inf]])
    bounds = ErrorBounds(fixed, fixed + torch.tensor([[0.1, 0.0, 0.0]]), HALF)
    assert not bounds.uncertain(fixed).any()  # 1.0 ahead, and nothing moved by more than 0.1
    bounds = ErrorBounds(torch.tensor([[1.0, -torch.inf]]), torch.tensor([[1.0, 0.0]]), HALF)
    assert bounds.uncertain(torch.tensor([[9.0, -9.0]])).all()  # nothing can be trusted any more


def test_where_most_labels_are_doubtful_exact_ones_are_used() -> None:
    for noise, pays in ((0.01, True), (3.0, False)):
        exact, fast = noisy(noise)
        assert (ErrorBounds(fast, exact, HALF).uncertain_share <= Backend.max_uncertain_share) == pays


def test_an_audits_sample_does_not_depend_on_chunks_or_on_what_was_before() -> None:
    draws = Calibration(seed=(5,)).rng.random(100_000) < AUDIT
    assert 140 < draws.sum() < 250  # one in 512
    again = Calibration(seed=(5,)).rng
    assert (np.concatenate([again.random(n) for n in (7, 993, 99_000)]) < AUDIT).tolist() == draws.tolist()


@pytest.mark.parametrize(("audited", "rate"), [(0, 1.0), (3000, 0.000998), (100, 0.0295)])
def test_the_share_of_wrong_labels_has_a_confidence_bound(audited: int, rate: float) -> None:
    assert error_rate_bound(0, audited) == pytest.approx(rate, rel=1e-2)


class Cancelling(nn.Module):
    """Class 7 is a small difference of large terms, which half precision gets wrong."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(3, 8)
        with torch.no_grad():
            self.fc.weight.zero_()
            self.fc.bias.zero_()
            self.fc.weight[0, 0], self.fc.weight[7, 1], self.fc.bias[7] = 20.0, 301.0, -150.5

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x.mean((2, 3)))  # type: ignore[no-any-return]


needs_half = pytest.mark.skipif(half_type(torch.device("cpu")) is None, reason="this CPU has no bfloat16 instructions")


def sorted_images() -> Tensor:
    """31 images on which class 7 lies far behind, then one on which it is close."""
    images = torch.zeros(32, 3, 16, 16)
    images[:, 0], images[:, 1] = 1.0, 110 / 255
    images[31, 1] = torch.floor(145.5 + torch.rand(16, 16, generator=torch.Generator().manual_seed(1))) / 255
    return images


@needs_half
@pytest.mark.parametrize("chunk", [64, 8192])
def test_sorted_images_do_not_teach_fast_labels_a_bound_too_small(chunk: int) -> None:
    images, options = sorted_images(), {"masks": 4, "chunk": chunk}
    exact, fast = (
        DoubleMasking(TorchClassifier(Cancelling().eval()), Threat.square(2), precision=p, **options).examine(
            images, [0] * 32, maps=True
        )
        for p in ("exact", "fast")
    )
    for reference, examined in zip(exact, fast, strict=True):
        assert (reference.table.labels == examined.table.labels).all()
        assert reference.certificate.certified == examined.certificate.certified


@needs_half
@pytest.mark.parametrize("first", [12, 14, 22])
def test_what_one_image_teaches_is_never_used_for_another(first: int) -> None:
    sample = load_dataset("sample")
    exact, fast = (
        DoubleMasking(load_classifier("zoo:tiny", device="cpu"), Threat.square(5), precision=p)
        for p in ("exact", "fast")
    )
    fast.examine([sample.image(first)], [0])
    tables = [d.examine([sample.image(141)], [0], maps=True)[0].table.labels for d in (exact, fast)]
    assert (tables[0] == tables[1]).all()
    assert not fast.engine.ready
    fast.predict([sample.image(141)])
    assert not fast.engine.ready
    fast.calibrate([sample.image(i) for i in range(8)])
    assert fast.engine.ready


@needs_half
@pytest.mark.parametrize("strict", [True, False], ids=["certified", "predicted"])
def test_what_an_image_with_very_many_masks_teaches_is_used_for_it_and_forgotten_for_others(strict: bool) -> None:
    image, other = (load_dataset("sample").image(i) for i in (2, 3))
    exact, fast = (
        DoubleMasking(load_classifier("zoo:tiny", device="cpu"), Threat.square(5, count=2), masks=4, precision=p)
        for p in ("exact", "fast")
    )
    tables = [d.examine([image], [0], maps=True)[0].table for d in (exact, fast)]
    assert (tables[0].labels == tables[1].labels).all()
    trusted = fast.engine.stats.labels
    assert trusted > 1000
    subject = fast.image_state(other)
    fast.engine.compute([LabelRequest(subject, subject.table.masks())], strict=strict)
    assert fast.engine.stats.labels == trusted  # all of the other's are exact
    assert not fast.engine.ready


@needs_half
def test_images_handed_in_to_be_classified_teach_nothing() -> None:
    harmless = torch.zeros(33, 3, 16, 16)
    harmless[:, 0] = 1
    defense = DoubleMasking(TorchClassifier(Cancelling().eval()), Threat.square(2), masks=4, precision="fast")
    defense.predict(harmless)
    assert not defense.engine.ready
    assert defense.engine.stats.labels == 0
    defense.calibrate(sorted_images())
    bounds = defense.engine.calibration.stages[0].bounds
    defense.predict(harmless)
    assert defense.engine.calibration.stages[0].bounds is bounds


@needs_half
def test_a_wrong_fast_label_caught_by_an_audit_makes_the_whole_group_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("patchcleanser.engine.fast.cascade.AUDIT", 1.0)  # every label is audited
    # No label is uncertain.
    monkeypatch.setattr(ErrorBounds, "uncertain", lambda self, fast: torch.zeros(len(fast), dtype=torch.bool))
    defense = DoubleMasking(TorchClassifier(Cancelling().eval()), Threat.square(2), masks=4, precision="fast")
    images = sorted_images()
    examined = defense.examine(images, [0] * 32, maps=True)
    exact = DoubleMasking(TorchClassifier(Cancelling().eval()), Threat.square(2), masks=4)
    for reference, recomputed in zip(exact.examine(images, [0] * 32, maps=True), examined, strict=True):
        assert (reference.table.labels == recomputed.table.labels).all()
    assert defense.engine.calibration.given_up
    wrong, audited = (sum(getattr(e.table, name) for e in examined) for name in ("caught", "audited"))
    assert 0 < wrong < audited  # and what was caught is not forgotten with the labels
    stats = defense.engine.stats
    assert (stats.caught, stats.audited) == (wrong, audited)


@pytest.mark.parametrize(("wrong", "audited"), [(0, 40), (1, 40), (5, 40), (39, 40), (40, 40)])
def test_the_bound_on_wrong_labels_is_the_share_at_which_so_few_would_be_seen_in_one_of_twenty(
    wrong: int, audited: int
) -> None:
    share = error_rate_bound(wrong, audited)
    few = sum(math.comb(audited, k) * share**k * (1 - share) ** (audited - k) for k in range(wrong + 1))
    assert few == pytest.approx(0.05 if wrong < audited else 1.0, rel=1e-6)


def test_margins_of_infinite_logits() -> None:
    raw = torch.tensor([[torch.nan, 1.0], [torch.inf, 1.0], [-torch.inf, -torch.inf], [1.0, 1.0 + 1e-7], [3.0, 1.0]])
    logits = sanitize(raw)
    assert logits.argmax(1).tolist() == [1, 0, 0, 0, 0] or logits.argmax(1).tolist()[:3] == [1, 0, 0]
    assert top2_margin(logits)[2] == 0
