"""The exact engine against a slow and obvious loop, however images are batched and whatever memory there is."""

from __future__ import annotations

from collections.abc import Callable, Sequence

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
    Preprocessing,
    Threat,
    TorchClassifier,
)
from patchcleanser.classifiers.classifier import Classifier
from patchcleanser.core.label_table import UNMASKED, LabelTable
from patchcleanser.core.masks import MaskSet
from patchcleanser.defenses.mask_defense import Defense
from patchcleanser.engine.exact import FIRST_PROBES, PROBE_EVERY, ExactEngine, default_chunk
from patchcleanser.engine.masking import ImageState, LabelRequest
from patchcleanser.errors import NotAFunctionError, OutOfMemoryError

Images = Callable[..., tuple[Tensor, Tensor]]

CLEAR = 1e-3
"""Labels with a larger margin must not depend on the batch; margins may move by less than this."""

SIZES = [(40, 36), (33, 50), (32, 32), (40, 36)]


@pytest.fixture
def mixed(coloured: Images) -> list[Tensor]:
    """Four images of three sizes."""
    return [coloured(1, size, seed=n, clutter=0.4)[0][0] for n, size in enumerate(SIZES)]


@pytest.fixture
def classifier(resnet: nn.Module, preprocessing: Preprocessing) -> TorchClassifier:
    return TorchClassifier(resnet, preprocessing)


def full_tables(defense: Defense, images: Sequence[Tensor]) -> list[LabelTable]:
    """Every label of every image, computed in one call."""
    return [examined.table for examined in defense.examine(images, [0] * len(images), maps=True)]


def slow_logits(classifier: Classifier, image: Tensor, keep: np.ndarray, grid: str) -> Tensor:
    """One image, one mask, one forward pass."""
    visible_pixels, preprocessing = torch.from_numpy(keep), classifier.preprocessing
    with torch.no_grad():
        if grid == "source":
            colour = torch.tensor(preprocessing.source_fill(3))[:, None, None]
            return classifier.logits(preprocessing((image * visible_pixels + colour * ~visible_pixels)[None]))[0]
        colour = torch.tensor(preprocessing.input_fill(3))[:, None, None]
        return classifier.logits((preprocessing(image[None])[0] * visible_pixels + colour * ~visible_pixels)[None])[0]


def assert_equals_slow_loop(table: LabelTable, classifier: Classifier, image: Tensor, grid: str) -> None:
    masks = table.mask_set
    visible = masks.visible()
    pairs = {int(masks.unions.index[i, j]): (i, j) for i in range(len(masks)) for j in range(len(masks))}
    visible_pixels = {u: visible[i] & visible[j] for u, (i, j) in pairs.items()} | {
        UNMASKED: np.ones(masks.image, dtype=bool)
    }
    assert len(visible_pixels) == len(table.labels)
    for union, keep in visible_pixels.items():
        logits = slow_logits(classifier, image, keep, grid)
        first, second = logits.topk(2).values.tolist()
        assert table.labels[union] == int(logits.argmax())
        assert table.margins[union] == pytest.approx(first - second, abs=CLEAR)
        assert table.confidences[union] == pytest.approx(float(logits.softmax(dim=0).max()), abs=CLEAR)


@pytest.mark.parametrize("chunk", [None, 5])
@pytest.mark.parametrize("grid", ["source", "input"])
def test_labels_margins_and_confidences_equal_a_slow_loop(
    grid: str, chunk: int | None, classifier: TorchClassifier, mixed: list[Tensor]
) -> None:
    defense = DoubleMasking(classifier, Threat.square(6, grid=grid), masks=(2, 3), chunk=chunk)
    tables = full_tables(defense, mixed)
    for table, image in zip(tables, mixed, strict=True):
        assert_equals_slow_loop(table, classifier, image, grid)
    assert len({int(label) for table in tables for label in table.labels}) > 2


def test_masks_of_several_windows_equal_a_slow_loop(classifier: TorchClassifier, mixed: list[Tensor]) -> None:
    defense = DoubleMasking(classifier, Threat.square(5, count=2), masks=2)
    (table,) = full_tables(defense, mixed[:1])
    assert max(len(mask) for mask in table.mask_set.unions.masks) > 2
    assert_equals_slow_loop(table, classifier, mixed[0], "source")


@pytest.mark.parametrize("grid", ["source", "input"])
def test_inputs_of_different_sizes_equal_a_slow_loop(grid: str, resnet: nn.Module, mixed: list[Tensor]) -> None:
    """Without resizing, a convolutional network sees inputs of several sizes within one chunk."""
    classifier = TorchClassifier(resnet, Preprocessing(mean=(0.5,) * 3, std=(0.5,) * 3))
    defense = DoubleMasking(classifier, Threat.square(6, grid=grid), masks=2, chunk=64)
    for table, image in zip(full_tables(defense, mixed), mixed, strict=True):
        assert_equals_slow_loop(table, classifier, image, grid)


def test_both_grids_agree_where_nothing_is_resized(resnet: nn.Module, coloured: Images) -> None:
    classifier = TorchClassifier(resnet, Preprocessing(mean=(0.5,) * 3, std=(0.5,) * 3))
    images, _ = coloured(3, (32, 32), seed=4)
    tables = [
        full_tables(DoubleMasking(classifier, Threat.square(6, grid=grid), masks=3), list(images))
        for grid in ("source", "input")
    ]
    for source, inputs in zip(*tables, strict=True):
        assert (source.labels == inputs.labels).all()
        assert np.abs(source.margins - inputs.margins).max() < CLEAR


def test_the_grids_differ_where_images_are_resized(classifier: TorchClassifier, coloured: Images) -> None:
    images, _ = coloured(1, (48, 40), seed=4)
    sizes = [
        full_tables(DoubleMasking(classifier, Threat.square(6, grid=grid), masks=3), list(images))[0].mask_set.image
        for grid in ("source", "input")
    ]
    assert sizes == [(48, 40), (32, 32)]


@pytest.mark.parametrize("grid", ["source", "input"])
@pytest.mark.parametrize("chunk", [1, 2, 7, 64])
def test_the_chunk_and_the_order_of_images_do_not_matter(
    chunk: int, grid: str, classifier: TorchClassifier, mixed: list[Tensor]
) -> None:
    threat = Threat.square(6, grid=grid)
    reference = full_tables(DoubleMasking(classifier, threat, masks=3), mixed)
    order = np.random.default_rng(chunk).permutation(len(mixed))
    shuffled = full_tables(DoubleMasking(classifier, threat, masks=3, chunk=chunk), [mixed[n] for n in order])
    compared = 0
    for n, got in zip(order, shuffled, strict=True):
        clear = reference[n].margins > CLEAR
        assert (got.labels[clear] == reference[n].labels[clear]).all()
        assert np.abs(got.margins - reference[n].margins).max() < CLEAR
        compared += int(clear.sum())
    assert compared > 0.95 * sum(len(table.labels) for table in reference)


@pytest.mark.parametrize("chunk", [1, 7, 64])
@pytest.mark.parametrize("defense", [DoubleMasking, ChallengerMasking, MinorityReports])
def test_verdicts_do_not_depend_on_the_chunk_or_on_other_images(
    defense: type, chunk: int, classifier: TorchClassifier, mixed: list[Tensor]
) -> None:
    together = defense(classifier, Threat.square(6), masks=3).predict(mixed)
    alone = [defense(classifier, Threat.square(6), masks=3, chunk=chunk).predict([image])[0] for image in mixed]
    assert together == alone


class Counting(nn.Module):
    """Counts its input rows, and keeps the largest batch."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.rows, self.largest = inner, 0, 0

    def forward(self, x: Tensor) -> Tensor:
        self.rows += len(x)
        self.largest = max(self.largest, len(x))
        return self.inner(x)


PROBE = 4
"""A probed pair is computed again, alone and beside another, at times after a first mask; `checks` counts that."""


@pytest.mark.parametrize("chunk", [None, 1, 7])
@pytest.mark.parametrize("grid", ["source", "input"])
@pytest.mark.parametrize("kind", [DoubleMasking, ChallengerMasking, MinorityReports])
def test_nothing_is_computed_twice(
    kind: type, grid: str, chunk: int | None, resnet: nn.Module, preprocessing: Preprocessing, mixed: list[Tensor]
) -> None:
    counting = Counting(resnet).eval()
    threat = Threat.square(6, grid=grid)
    defense = kind(TorchClassifier(counting, preprocessing, classes=10), threat, masks=3, chunk=chunk)
    verdicts = defense.predict(mixed)
    checks, padding = defense.engine.exact.checks, defense.engine.exact.padding
    assert counting.rows == sum(v.classifications for v in verdicts) + checks + padding
    assert 0 < checks <= (FIRST_PROBES + counting.rows // PROBE_EVERY) * PROBE
    for maps in (False, True):
        before = counting.rows - defense.engine.exact.checks - defense.engine.exact.padding
        certificates = defense.certify(mixed, [v.label for v in verdicts], maps=maps)
        after = counting.rows - defense.engine.exact.checks - defense.engine.exact.padding
        assert after - before == sum(c.classifications for c in certificates)
    if chunk is not None:
        assert counting.largest <= chunk


def test_a_certificate_looks_at_every_union_once_at_most(classifier: TorchClassifier, mixed: list[Tensor]) -> None:
    defense = DoubleMasking(classifier, Threat.square(6), masks=3)
    labels = [v.label for v in defense.predict(mixed)]
    unions = [len(MaskSet.build(Threat.square(6), image=size, masks=3).unions) for size in SIZES]
    full = [c.classifications for c in defense.certify(mixed, labels, maps=True)]
    assert full == unions
    quick = defense.certify(mixed, labels)
    assert all(c.classifications <= most for c, most in zip(quick, unions, strict=True))


def test_labels_in_the_table_are_not_computed_again(resnet: nn.Module, preprocessing: Preprocessing) -> None:
    counting = Counting(resnet).eval()
    engine = ExactEngine(TorchClassifier(counting, preprocessing), grid="source")
    masks = MaskSet.build(Threat.square(6), image=(32, 32), masks=3)
    state = ImageState(torch.rand(3, 32, 32, generator=torch.Generator().manual_seed(0)), LabelTable(masks))
    for unions, new in [([0, 1, 2], 3), ([2, 1], 0), ([2, 3, 3, 3], 1), ([], 0), ([UNMASKED], 1)]:
        before = counting.rows - engine.checks - engine.padding
        engine.compute([LabelRequest(state, np.array(unions, dtype=np.intp))])
        assert counting.rows - engine.checks - engine.padding == before + new
    assert state.table.spent == 5


class Cramped(Counting):
    """Runs out of memory above a number of images at a time, in the words of its device."""

    def __init__(self, inner: nn.Module, memory: int, error: Exception) -> None:
        super().__init__(inner)
        self.memory, self.error = memory, error

    def forward(self, x: Tensor) -> Tensor:
        if len(x) > self.memory:
            raise self.error
        return super().forward(x)


OUT_OF_MEMORY = [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
    RuntimeError("[enforce fail at alloc_cpu.cpp:116] DefaultCPUAllocator: can't allocate memory: you tried ..."),
    RuntimeError("MPS backend out of memory (MPS allocated: 8.00 GB)"),
    MemoryError(),
]


@pytest.mark.parametrize("error", OUT_OF_MEMORY, ids=["cuda", "cpu", "mps", "python"])
@pytest.mark.parametrize("grid", ["source", "input"])
def test_too_little_memory_means_smaller_chunks_and_the_same_labels(
    grid: str, error: Exception, resnet: nn.Module, preprocessing: Preprocessing, mixed: list[Tensor]
) -> None:
    threat = Threat.square(6, grid=grid)
    roomy = full_tables(DoubleMasking(TorchClassifier(resnet, preprocessing), threat, masks=3), mixed)
    cramped = Cramped(resnet, 5, error).eval()
    defense = DoubleMasking(TorchClassifier(cramped, preprocessing), threat, masks=3)
    for got, want in zip(full_tables(defense, mixed), roomy, strict=True):
        assert (got.labels == want.labels).all()
        assert np.abs(got.margins - want.margins).max() < CLEAR
    assert 1 <= defense.engine.exact.max_rows <= 5
    assert cramped.largest <= 5


def test_smaller_batches_are_remembered(resnet: nn.Module, preprocessing: Preprocessing, mixed: list[Tensor]) -> None:
    cramped = Cramped(resnet, 5, OUT_OF_MEMORY[0]).eval()
    defense = DoubleMasking(TorchClassifier(cramped, preprocessing), Threat.square(6), masks=3)
    verdicts = defense.predict(mixed)
    remembered = defense.engine.exact.max_rows
    cramped.error = AssertionError("a batch that is known not to fit")
    assert defense.predict(mixed) == verdicts
    assert defense.engine.exact.max_rows == remembered


@pytest.mark.parametrize("error", OUT_OF_MEMORY, ids=["cuda", "cpu", "mps", "python"])
@pytest.mark.parametrize("chunk", [None, 1])
def test_the_error_of_an_image_that_does_not_fit_names_its_shape(
    chunk: int | None, error: Exception, resnet: nn.Module, mixed: list[Tensor]
) -> None:
    defense = DoubleMasking(Cramped(resnet, 0, error).eval(), Threat.square(6), masks=3, chunk=chunk)
    words = r"not even one image of \(3, 40, 36\) fits into the memory of cpu; use a smaller model or another device"
    with pytest.raises(OutOfMemoryError, match=words):
        defense.predict(mixed[:1])


@pytest.mark.parametrize("error", OUT_OF_MEMORY, ids=["cuda", "cpu", "mps", "python"])
def test_functions_get_smaller_chunks_too(
    error: Exception, resnet: nn.Module, preprocessing: Preprocessing, mixed: list[Tensor]
) -> None:
    want = DoubleMasking(TorchClassifier(resnet, preprocessing), Threat.square(6), masks=3).predict(mixed)
    function = CallableClassifier(Cramped(resnet, 5, error).eval(), preprocessing, array="torch")
    defense = DoubleMasking(function, Threat.square(6), masks=3)
    assert defense.predict(mixed) == want
    assert defense.engine.exact.max_rows <= 5


class FunctionalDropout(nn.Module):
    """Drops features at random, although it is in eval mode."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return functional.dropout(self.inner(x), p=0.5, training=True)


class BatchMean(FunctionalDropout):
    """Looks at the other images of the batch."""

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x - x.mean(dim=0, keepdim=True))


class Growing(FunctionalDropout):
    """Depends on the number of calls."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.inner(x) * self.calls


class TinyNoise(FunctionalDropout):
    """As far from a function as kernels are that add numbers in another order."""

    def forward(self, x: Tensor) -> Tensor:
        logits = self.inner(x)
        return logits + 1e-5 * torch.randn(logits.shape)


@pytest.mark.parametrize("grid", ["source", "input"])
@pytest.mark.parametrize("wrapper", [FunctionalDropout, BatchMean, Growing])
@pytest.mark.parametrize("verb", ["predict", "certify"])
def test_a_model_that_is_no_function_is_refused_every_time(
    verb: str, wrapper: type, grid: str, resnet: nn.Module, preprocessing: Preprocessing, mixed: list[Tensor]
) -> None:
    torch.manual_seed(0)
    model = TorchClassifier(wrapper(resnet).eval(), preprocessing)
    defense = DoubleMasking(model, Threat.square(6, grid=grid), masks=3)
    arguments = (mixed, [0] * len(mixed)) if verb == "certify" else (mixed,)
    for _ in range(2):  # catching the error and asking again must not get an answer
        with pytest.raises(NotAFunctionError, match=r"the same image got logits .* apart .* alone and in a batch"):
            getattr(defense, verb)(*arguments)


def test_rounding_is_no_reason_to_refuse(resnet: nn.Module, preprocessing: Preprocessing, mixed: list[Tensor]) -> None:
    torch.manual_seed(0)
    noisy = TorchClassifier(TinyNoise(resnet).eval(), preprocessing)
    got, want = (
        [v.label for v in DoubleMasking(model, Threat.square(6), masks=3).predict(mixed)]
        for model in (noisy, TorchClassifier(resnet, preprocessing))
    )
    assert got == want


@pytest.mark.parametrize(("numbers", "want"), [(1, 512), (3 * 224 * 224, 10), (8_000_000, 1), (10**9, 1)])
def test_the_first_chunk_on_a_cpu_follows_the_input_size(numbers: int, want: int) -> None:
    assert default_chunk(torch.device("cpu"), numbers) == want


def test_a_module_that_fails_with_channels_last_runs_without() -> None:
    class Viewing(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = torch.nn.Conv2d(3, 4, 3)
            self.head = torch.nn.Linear(4 * 6 * 6, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.conv(x).view(len(x), -1))  # type: ignore[no-any-return]

    module = Viewing().eval()
    x = torch.rand(2, 3, 8, 8)
    with torch.inference_mode():
        assert torch.equal(TorchClassifier(module).logits(x), module(x))


def test_a_module_that_wrote_into_its_inputs_before_it_failed_gets_fresh_ones() -> None:
    class Writing(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.mul_(2.0).view(len(x), -1)[:, :2]

    images = torch.rand(2, 3, 8, 8)
    want = 2 * images.view(2, -1)[:, :2]
    with torch.inference_mode():
        given = images.contiguous(memory_format=torch.channels_last)
        assert torch.equal(TorchClassifier(Writing().eval()).logits(given), want)
