"""Ways to labels that are faster than float32 in torch, and are checked against it."""

from __future__ import annotations

import copy
import pickle
import random
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from patchcleanser import DoubleMasking, Threat, TorchClassifier, load_classifier, load_dataset
from patchcleanser.attacks.adaptive import defense_on_grid
from patchcleanser.core.masks import MaskSet
from patchcleanser.engine.exact import BATCH_NUMEL
from patchcleanser.engine.fast.backends import AutocastBackend, Backend, UnusableError
from patchcleanser.engine.fast.calibration import MAX_UNCERTAIN_SHARE, ErrorBounds
from patchcleanser.engine.fast.half import BLOCKS, SHAPES, HalfPrecisionBackend, _Player
from patchcleanser.engine.fast.onnxruntime import OnnxRuntimeBackend
from patchcleanser.engine.float32 import pause_other_threads, strict_float32
from patchcleanser.errors import NotAFunctionError, OutputError, TrainModeError

pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")


@pytest.fixture
def no_half(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU without instructions for half precision."""
    monkeypatch.setattr("patchcleanser.engine.fast.onnxruntime.half_type", lambda device: None)


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.head, self.scale = nn.Conv2d(3, 8, 3, 2, groups=1), nn.Linear(8, 4), 1.0

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.conv(x).relu().mean((2, 3))) * self.scale  # type: ignore[no-any-return]


class Branching(Small):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if x.mean() < 0.9 else -super().forward(x)


def photos(number: int) -> Tensor:
    return torch.rand(number, 3, 12, 12, generator=torch.Generator().manual_seed(0))


def labels_of(defense: DoubleMasking, images: Tensor) -> np.ndarray:
    return np.stack([e.table.labels for e in defense.examine(images, [0] * len(images), maps=True)])


def test_labels_through_onnx_runtime_equal_exact_ones_and_few_are_computed_twice(no_half: None) -> None:
    sample = load_dataset("sample")
    images = torch.stack([sample.image(i) for i in range(0, 300, 25)])
    tables = {}
    for precision in ("exact", "fast"):
        classifier = load_classifier("zoo:tiny", device="cpu")
        defense = DoubleMasking(classifier, Threat.square(5), masks=4, precision=precision)
        tables[precision] = labels_of(defense, images)
    assert isinstance(defense.engine.calibration.stages[0].backend, OnnxRuntimeBackend)
    assert (tables["exact"] == tables["fast"]).all()
    assert defense.engine.stats.labels > 0
    assert defense.engine.stats.rechecked < defense.engine.stats.labels / 20


@pytest.mark.parametrize("threads", [1, 2, 3, 8])
def test_threads_with_images_of_their_own_answer_in_the_order_of_the_images(
    threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    monkeypatch.setattr("patchcleanser.engine.fast.onnxruntime.RUN", 2 * photos(1).numel())
    module = Small().eval()
    way = OnnxRuntimeBackend(TorchClassifier(module, classes=4))
    for number in (8, 1, 2, 5, 7, 33):
        with torch.inference_mode():
            got, want = way.logits(photos(number)), module(photos(number))
        assert torch.allclose(got, want, atol=1e-6)
        assert len(want.round(decimals=4).unique(dim=0)) == number  # no two rows could be exchanged
    (session,) = way._sessions.values()
    assert session.session.get_session_options().intra_op_num_threads == 1


@pytest.mark.parametrize(("threads", "each"), [(8, 1), (9, 9)])
def test_threads_that_would_have_no_image_even_of_several_chunks_work_together(
    threads: int, each: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    module = Small().eval()
    way = OnnxRuntimeBackend(TorchClassifier(module, classes=4))
    for number in (2, 9):  # the first is a chunk, of which four come at a time later
        with torch.inference_mode():
            assert torch.allclose(way.logits(photos(number)), module(photos(number)), atol=1e-6)
    (session,) = way._sessions.values()
    assert session.session.get_session_options().intra_op_num_threads == each


class Hungry(AutocastBackend):
    """A way, as fine as float32, that likes several chunks at once and notes what it got."""

    chunks = 4

    def __init__(self, classifier: TorchClassifier) -> None:
        super().__init__(classifier, torch.float32)
        self.room, self.got = 1000, [0]

    def logits(self, inputs: Tensor) -> Tensor:
        if len(inputs) > self.room:
            raise MemoryError
        self.got.append(len(inputs))
        return self.classifier.checked_logits(inputs)


def hungry(chunk: int | None, monkeypatch: pytest.MonkeyPatch) -> tuple[DoubleMasking, Hungry]:
    """A defense of small chunks, whose way was compared with the exact one in such."""
    monkeypatch.setitem(BATCH_NUMEL, "cpu", 5 * photos(1).numel())
    classifier = TorchClassifier(Small().eval(), classes=4)
    defense = DoubleMasking(classifier, Threat.square(2), masks=3, chunk=chunk, precision="fast")
    defense.engine.candidates = [[way := Hungry(classifier)]]
    defense.calibrate(photos(60))
    assert defense.engine.ready
    assert max(way.got) == 5
    return defense, way


@pytest.mark.parametrize(("chunk", "most"), [(None, 20), (5, 5)])
def test_a_way_gets_as_many_chunks_as_it_likes_unless_their_size_was_set(
    chunk: int | None, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    defense, way = hungry(chunk, monkeypatch)
    exact = DoubleMasking(way.classifier, Threat.square(2), masks=3)
    assert defense.predict(photos(9)) == exact.predict(photos(9))
    assert max(way.got) == most


def test_where_several_chunks_are_too_much_a_way_gets_one(monkeypatch: pytest.MonkeyPatch) -> None:
    defense, way = hungry(None, monkeypatch)
    exact = DoubleMasking(way.classifier, Threat.square(2), masks=3)
    way.room = 12
    assert defense.predict(photos(9)) == exact.predict(photos(9))
    way.got.clear()
    assert defense.predict(photos(9)) == exact.predict(photos(9))
    assert max(way.got) == 5


def test_a_network_that_looks_at_the_image_to_decide_what_to_do_is_not_exported(no_half: None) -> None:
    module = Branching().eval()
    with pytest.raises(UnusableError, match="Branching cannot be exported"):
        OnnxRuntimeBackend(TorchClassifier(module, classes=4)).logits(photos(2))
    fast, exact = (
        labels_of(DoubleMasking(TorchClassifier(module), Threat.square(2), masks=3, precision=p), photos(12))
        for p in ("fast", "exact")
    )
    assert (fast == exact).all()


@pytest.mark.parametrize("kind", [OnnxRuntimeBackend, HalfPrecisionBackend])
@pytest.mark.parametrize("change", ["weights", "setting"])
def test_what_was_made_from_a_network_that_changed_is_made_again(
    no_half: None, change: str, kind: type[OnnxRuntimeBackend | HalfPrecisionBackend]
) -> None:
    module = Small().eval()
    classifier = TorchClassifier(module, classes=4)
    way = kind(classifier)
    way.refresh()
    before = way.logits(photos(3))
    if change == "weights":
        with torch.no_grad():
            module.head.bias += 1
        with pytest.raises(UnusableError, match="changed since it was calibrated"):
            way.logits(photos(3))
    else:
        module.scale = 2.0
    way.refresh()
    after = pickle.loads(pickle.dumps(way)).logits(photos(3))  # also when sent to another process
    assert (after - before).abs().max() > 0.1
    with torch.inference_mode():
        assert (after - classifier.logits(photos(3))).abs().max() < 10 * way.resolution


@pytest.mark.parametrize("change", ["buffer", "hook"])
def test_buffers_that_are_not_stored_and_hooks_are_noticed_too(change: str) -> None:
    module = Small().eval()
    module.register_buffer("extra", torch.ones(4), persistent=False)
    way = HalfPrecisionBackend(TorchClassifier(module, classes=4))
    way.logits(photos(2))
    if change == "buffer":
        module.extra += 1
    else:
        module.head.register_forward_hook(lambda module, inputs, output: -output)
    with pytest.raises(UnusableError, match="changed"):
        way.logits(photos(2))


@pytest.mark.parametrize("change", ["moved", "replaced"])
def test_a_layer_that_went_elsewhere_or_became_another_is_noticed_too(change: str) -> None:
    stem, body = nn.Sequential(nn.Conv2d(3, 3, 1)), nn.Sequential(nn.ReLU(), nn.Conv2d(3, 3, 1), nn.ReLU())
    module = nn.Sequential(stem, body, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, 4)).eval()
    way = HalfPrecisionBackend(TorchClassifier(module, classes=4))
    way.logits(photos(2))
    if change == "moved":
        body.append(stem.pop(0))
    else:
        body[0] = nn.Identity().eval()
    with pytest.raises(UnusableError, match="changed"):
        way.logits(photos(2))


def test_an_answer_of_the_old_copy_is_not_given_though_another_thread_knows_the_new_network() -> None:
    asked, go_on = threading.Event(), threading.Event()
    go_on.set()

    class Slow(Small):
        def forward(self, x: Tensor) -> Tensor:
            asked.set()
            assert go_on.wait(60)
            return super().forward(x)

    module = Slow().eval()
    way = HalfPrecisionBackend(TorchClassifier(module, classes=4))
    way.logits(photos(2))
    with torch.no_grad():
        module.head.weight *= -3
    asked.clear()
    go_on.clear()
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(way.logits, photos(2))
        assert asked.wait(60)
        way.refresh()  # as whoever calibrates does
        go_on.set()
        with pytest.raises(UnusableError, match="changed while it was asked"):
            answer.result()


@pytest.mark.parametrize("half", [torch.bfloat16, None])
def test_what_was_learnt_about_other_weights_is_not_used(
    half: torch.dtype | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("patchcleanser.engine.fast.onnxruntime.half_type", lambda device: half)
    module = Small().eval()
    classifier = TorchClassifier(module, classes=4)
    defense, exact = (DoubleMasking(classifier, Threat.square(2), masks=3, precision=p) for p in ("fast", "exact"))
    defense.calibrate(photos(60))
    assert defense.engine.ready
    with torch.no_grad():
        module.head.weight *= -3
    assert defense.predict(photos(4)) == exact.predict(photos(4))
    assert not defense.engine.ready
    defense.certify(photos(8), [0] * 8)  # few as they are, they are compared again
    assert defense.engine.ready


@pytest.mark.parametrize("inference", [False, True], ids=["data", "inference"])
def test_weights_written_to_behind_torchs_back_are_noticed_when_clean_images_are_certified(
    inference: bool, no_half: None
) -> None:
    with torch.inference_mode(inference):
        module = Small().eval()
    classifier = TorchClassifier(module, classes=4)
    defense, exact = (DoubleMasking(classifier, Threat.square(2), masks=3, precision=p) for p in ("fast", "exact"))
    defense.calibrate(photos(60))
    assert defense.engine.ready
    with torch.inference_mode(inference):
        for weight in module.head.parameters():
            numbers = weight if inference else weight.data
            numbers.copy_(numbers.flip(0))  # their sum and length are the same
    if inference:  # then at once
        assert defense.predict(photos(4)) == exact.predict(photos(4))
    assert (labels_of(defense, photos(4)) == labels_of(exact, photos(4))).all()
    assert defense.predict(photos(4)) == exact.predict(photos(4))


def test_a_copy_of_a_defense_trusts_nothing_before_it_has_compared_its_own_network(no_half: None) -> None:
    module = Small().eval()
    defense = DoubleMasking(TorchClassifier(module, classes=4), Threat.square(2), masks=3, precision="fast")
    defense.calibrate(photos(60))
    assert defense.engine.ready
    for other in (pickle.loads(pickle.dumps(defense)), copy.deepcopy(defense)):
        assert not other.engine.ready
        assert other.predict(photos(4)) == defense.predict(photos(4))
        other.calibrate(photos(60))
        assert other.engine.ready
    assert defense.engine.ready


class Largest(Small):
    """Takes the largest of some."""

    def __init__(self, largest: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.largest = largest

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.largest(self.conv(x).relu()).flatten(2).mean(2))  # type: ignore[no-any-return]


class Broken(Largest):
    """Divides by the brightness of a pixel before."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x / x.sum(1, keepdim=True))


LARGEST = {
    "amax": lambda x: x.amax((2, 3), keepdim=True),
    "window": lambda x: functional.max_pool2d(x, 4),
    "whole": lambda x: functional.adaptive_max_pool2d(x, 1),
    "top": lambda x: x.flatten(2).topk(3).values,
}


@pytest.mark.parametrize("largest", LARGEST)
def test_where_onnx_runtime_makes_numbers_of_what_is_none_it_is_not_used(largest: str, no_half: None) -> None:
    images = photos(60).clamp_min(0.02)
    classifier = TorchClassifier(Broken(LARGEST[largest]).eval(), classes=4)
    defense = DoubleMasking(classifier, Threat.square(2), masks=3, precision="fast")
    defense.calibrate(images)
    assert not defense.engine.ready
    images[:, :, 3:5, 3:5] = 0
    with pytest.raises(OutputError, match="NaN"):
        defense.certify(images[:1], [0])


def test_where_only_numbers_come_before_the_largest_is_taken_onnx_runtime_is_used(no_half: None) -> None:
    classifier = TorchClassifier(Largest(LARGEST["window"]).eval(), classes=4)
    defense = DoubleMasking(classifier, Threat.square(2), masks=3, precision="fast")
    defense.calibrate(photos(60))
    assert isinstance(defense.engine.calibration.stages[0].backend, OnnxRuntimeBackend)
    assert defense.engine.ready


class Keeping(Small):
    """Keeps what it saw last, and something that cannot be copied."""

    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.Lock()

    def forward(self, x: Tensor) -> Tensor:
        self.last = x.shape
        return super().forward(x)


def test_a_network_that_keeps_things_of_its_own_stays_fast(no_half: None) -> None:
    defense = DoubleMasking(TorchClassifier(Keeping().eval(), classes=4), Threat.square(2), masks=3, precision="fast")
    defense.calibrate(photos(60))
    assert defense.engine.ready
    defense.certify(photos(2), [0, 0])
    assert defense.engine.ready


def test_a_shallow_copy_with_the_same_network_knows_what_was_learnt(no_half: None) -> None:
    defense = DoubleMasking(
        TorchClassifier(Small().eval(), classes=4), Threat.square(2, grid="input"), masks=3, precision="fast"
    )
    defense.calibrate(photos(60))
    placed = defense_on_grid(defense)
    assert placed.engine.ready
    assert placed.predict(photos(4)) == defense.predict(photos(4))


class Chance(Small):
    """Chance drawn by Python, which is a constant in an export."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + x.new_tensor([0.02 * random.uniform(-1, 1), 0, 0, 0])


class ByCompany(Small):
    """Mixes the images of a batch."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (1 + 0.01 * x.mean())


@pytest.mark.parametrize("kind", [Chance, ByCompany])
def test_a_classifier_that_is_no_function_is_refused_though_its_fast_way_is_one(
    kind: type[Small], no_half: None
) -> None:
    defense = DoubleMasking(TorchClassifier(kind().eval(), classes=4), Threat.square(2), masks=3, precision="fast")
    with pytest.raises(NotAFunctionError):
        defense.certify(photos(60), [0] * 60)


def test_nobody_is_in_float32_while_a_network_is_written_down() -> None:
    order: list[str] = []
    asked, inside = threading.Event(), threading.Event()

    def predict() -> None:
        with strict_float32(torch.device("cpu")):
            inside.set()
            asked.wait(10)
            with strict_float32(torch.device("cpu")):  # whoever is in it goes on
                order.append("in float32")

    def write() -> None:
        asked.set()
        with pause_other_threads():
            order.append("writing")

    threads = [threading.Thread(target=predict), threading.Thread(target=write)]
    threads[0].start()
    inside.wait(10)
    threads[1].start()
    for thread in threads:
        thread.join(20)
    assert order == ["in float32", "writing"]
    with strict_float32(torch.device("cpu")), pause_other_threads():  # and does not wait for itself
        pass


def test_where_the_first_way_is_too_coarse_the_next_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("patchcleanser.engine.fast.onnxruntime.half_type", lambda device: torch.bfloat16)
    uncertain = ErrorBounds.uncertain

    def coarse(self: ErrorBounds, fast: Tensor) -> Tensor:
        half = self._resolution > torch.finfo(torch.float16).eps
        return torch.ones(len(fast), dtype=torch.bool) if half else uncertain(self, fast)

    monkeypatch.setattr(ErrorBounds, "uncertain", coarse)
    assert MAX_UNCERTAIN_SHARE < 1
    defense = DoubleMasking(TorchClassifier(Small().eval()), Threat.square(2), masks=3, precision="fast")
    assert [type(backend) for (backend,) in defense.engine.candidates] == [AutocastBackend, OnnxRuntimeBackend]
    fast = labels_of(defense, photos(20))
    assert isinstance(defense.engine.calibration.stages[0].backend, OnnxRuntimeBackend)
    assert defense.engine.ready
    exact = DoubleMasking(TorchClassifier(Small().eval()), Threat.square(2), masks=3)
    assert (fast == labels_of(exact, photos(20))).all()


def test_the_half_precision_copy_is_a_copy_and_obeys_the_mode_of_the_network() -> None:
    module = Small().eval()
    way = HalfPrecisionBackend(TorchClassifier(module, classes=4))
    way.logits(photos(2))
    assert {p.dtype for p in module.parameters()} == {torch.float32}
    module.train()
    with pytest.raises(TrainModeError):
        way.logits(photos(2))


class InFloat32(Small):
    """As some networks do: a part works in float32, whatever the weights are."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.float())


class Typed(Small):
    """As quantised layers do: it takes float32 only, and some of its state is no tensor."""

    def get_extra_state(self) -> str:
        return "no tensor"

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.conv(x)
        if hidden.dtype != torch.float32:
            raise RuntimeError("expected scalar type Float")
        return self.head(hidden.mean((2, 3)))  # type: ignore[no-any-return]


def test_where_half_precision_fails_the_network_is_classified_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("patchcleanser.engine.fast.onnxruntime.half_type", lambda device: torch.bfloat16)
    classifier = TorchClassifier(Typed().eval(), classes=4)
    fast, exact = (DoubleMasking(classifier, Threat.square(2), masks=3, precision=p) for p in ("fast", "exact"))
    assert (labels_of(fast, photos(12)) == labels_of(exact, photos(12))).all()
    assert not isinstance(fast.engine.calibration.stages[0].backend, AutocastBackend)


class OnlyOneSize(Backend):
    """A way that exists for the images it was learnt from, and for others not."""

    resolution = torch.finfo(torch.float32).eps

    def __init__(self, classifier: TorchClassifier) -> None:
        self.classifier, self.side = classifier, 12

    def logits(self, inputs: Tensor) -> Tensor:
        if inputs.shape[-1] != self.side:
            raise UnusableError("another size")
        return self.classifier.checked_logits(inputs)


def test_a_network_that_does_not_bear_half_precision_says_so() -> None:
    with pytest.raises(UnusableError, match="does not work in float16"):
        HalfPrecisionBackend(TorchClassifier(InFloat32().eval(), classes=4)).logits(photos(2))


def test_labels_of_a_size_that_was_never_compared_are_the_exact_ones_and_the_others_stay_fast() -> None:
    classifier = TorchClassifier(Small().eval(), classes=4)
    defense, exact = (
        DoubleMasking(classifier, Threat.square(2), masks=3, precision=precision) for precision in ("fast", "exact")
    )
    defense.engine.candidates = [[OnlyOneSize(classifier)]]
    defense.calibrate(photos(60))
    assert defense.engine.ready
    larger = torch.rand(3, 3, 14, 14, generator=torch.Generator().manual_seed(3))
    assert defense.predict(larger) == exact.predict(larger)
    assert defense.engine.ready  # OnlyOneSize would have complained
    before = defense.engine.stats.labels
    assert defense.predict(photos(3)) == exact.predict(photos(3))
    assert defense.engine.stats.labels > before


def test_ways_are_told_how_many_labels_to_expect() -> None:
    defense = DoubleMasking(TorchClassifier(Small().eval(), classes=4), Threat.square(2), masks=3, precision="fast")
    defense.check_size((12, 12))
    defense.hint_total_images(10)
    assert {backends[0].expected for backends in defense.engine.candidates} == {
        10 * len(defense.mask_set((12, 12)).unions)
    }


def test_a_network_made_in_inference_mode_or_with_a_state_of_its_own_has_fast_ways() -> None:
    class Own(Small):
        def get_extra_state(self) -> str:
            return "no tensor"

    with torch.inference_mode():
        module = Own().eval()
        for way in (
            HalfPrecisionBackend(TorchClassifier(module, classes=4)),
            OnnxRuntimeBackend(TorchClassifier(module, classes=4)),
        ):
            way.refresh()
            assert way.logits(photos(2)).shape == (2, 4)


def test_a_network_whose_copy_is_itself_is_not_touched() -> None:
    class Single(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Shared()

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x)  # type: ignore[no-any-return]

    class Shared(Small):
        def __deepcopy__(self, memo: dict[int, object]) -> Shared:
            return self

    for module in (Shared().eval(), Single().eval()):
        with pytest.raises(UnusableError, match="shares parts"):
            HalfPrecisionBackend(TorchClassifier(module, classes=4)).logits(photos(2))
        assert {p.dtype for p in module.parameters()} == {torch.float32}


def test_a_network_that_cannot_be_laid_out_anew_says_so() -> None:
    module = Small().eval()
    module.register_buffer("volume", torch.zeros(1, 2, 2, 2, 2))  # there is no channels last for five dimensions
    with pytest.raises(UnusableError, match="cannot be copied"):
        HalfPrecisionBackend(TorchClassifier(module, classes=4)).logits(photos(2))


def test_the_copy_computes_in_float16_whatever_autocast_surrounds_it() -> None:
    way = HalfPrecisionBackend(TorchClassifier(Small().eval(), classes=4))
    with torch.inference_mode():
        alone = way.logits(photos(3))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert (way.logits(photos(3)) == alone).all()


def test_shapes_that_never_come_again_are_not_remembered_for_ever() -> None:
    classifier = TorchClassifier(Small().eval(), classes=4)
    player = _Player(classifier, steady=True)
    with torch.inference_mode():
        for height in range(4, 4 + SHAPES + 8):
            player._played(torch.zeros(1, 3, height, 4))
    assert len(player._graphs) <= SHAPES


def test_what_was_made_for_one_size_of_input_is_not_made_again_after_another(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []

    class Block:
        """Says by which decision it was made: so many labels were expected."""

        def __init__(self, copied: TorchClassifier, inputs: Tensor, expected: int) -> None:
            self.expected = expected
            made.append(inputs.shape[-1])

        def __call__(self, inputs: Tensor) -> Tensor:
            return torch.full((len(inputs), 4), float(self.expected))

    monkeypatch.setattr("patchcleanser.engine.fast.half._Block", Block)
    player = _Player(TorchClassifier(Small().eval(), classes=4), steady=True)
    player.blocks = True
    sides = range(8, 8 + BLOCKS + 1)
    with torch.inference_mode():
        first, again = (
            [player(torch.zeros(80, 3, side, side), 80, expected) for side in sides] for expected in (1000, 0)
        )
    assert made == [*sides][:BLOCKS]
    assert all((a == b).all() for a, b in zip(first, again, strict=True))


class OnlyInCompany(OnlyOneSize):
    """A way that fails, or answers otherwise, for one image alone, as a probe asks about it."""

    alone: float | None = 0.0

    def logits(self, inputs: Tensor) -> Tensor:
        if len(inputs) == 1 and self.alone is None:
            raise UnusableError("a batch of one")
        logits = super().logits(inputs)
        logits[:, 0] += (self.alone or 0.0) * (len(inputs) == 1)
        return logits


@pytest.mark.parametrize("alone", [None, 9.0])
def test_a_way_that_fails_when_it_is_probed_is_left(alone: float | None) -> None:
    classifier = TorchClassifier(Small().eval(), classes=4)
    defense, exact = (
        DoubleMasking(classifier, Threat.square(2), masks=3, precision=precision) for precision in ("fast", "exact")
    )
    defense.engine.candidates = [[way := OnlyInCompany(classifier)]]
    defense.calibrate(photos(60))
    assert defense.engine.ready
    way.alone = alone
    assert defense.predict(photos(3)) == exact.predict(photos(3))
    assert not defense.engine.ready


def test_masks_made_by_hand_count_in_what_is_expected() -> None:
    masks = MaskSet.build(Threat.square(2), image=(12, 12), masks=3)
    defense = DoubleMasking(
        TorchClassifier(Small().eval(), classes=4), Threat.square(2), mask_set=masks, precision="fast"
    )
    defense.hint_total_images(10)
    assert {backends[0].expected for backends in defense.engine.candidates} == {10 * len(masks.unions)}
