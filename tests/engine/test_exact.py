"""The hot path against a slow and obvious loop, however images are batched and whatever memory there is."""

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
    Job,
    MinorityReports,
    Preprocessing,
    Threat,
    TorchClassifier,
    load_classifier,
    load_dataset,
)
from patchcleanser.classifiers.classifier import Classifier
from patchcleanser.core.label_table import UNMASKED, LabelTable
from patchcleanser.core.masks import MaskSet
from patchcleanser.defenses.mask_defense import Defense
from patchcleanser.engine.exact import FIRST_PROBES, PROBE_EVERY, ExactEngine, default_chunk
from patchcleanser.engine.fast.backends import half_type
from patchcleanser.engine.fast.calibration import SAMPLE
from patchcleanser.engine.fast.float8.backend import Float8Backend
from patchcleanser.engine.fast.half import HalfPrecisionBackend
from patchcleanser.engine.masking import ImageState, LabelRequest, PairBatch
from patchcleanser.errors import NotAFunctionError, OutOfMemoryError
from patchcleanser.evaluation.workloads import Batch, CertifyWorkload

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
    """Every label, of every image, asked for in one call."""
    return [examined.table for examined in defense.examine(images, [0] * len(images), maps=True)]


def slow_logits(classifier: Classifier, image: Tensor, keep: np.ndarray, grid: str) -> Tensor:
    """One image, one mask, one forward pass."""
    kept, preprocessing = torch.from_numpy(keep), classifier.preprocessing
    with torch.no_grad():
        if grid == "source":
            colour = torch.tensor(preprocessing.source_fill(3))[:, None, None]
            return classifier.logits(preprocessing((image * kept + colour * ~kept)[None]))[0]
        colour = torch.tensor(preprocessing.input_fill(3))[:, None, None]
        return classifier.logits((preprocessing(image[None])[0] * kept + colour * ~kept)[None])[0]


def assert_equals_slow_loop(table: LabelTable, classifier: Classifier, image: Tensor, grid: str) -> None:
    masks = table.mask_set
    visible = masks.visible()
    pairs = {int(masks.unions.index[i, j]): (i, j) for i in range(len(masks)) for j in range(len(masks))}
    kept = {u: visible[i] & visible[j] for u, (i, j) in pairs.items()} | {UNMASKED: np.ones(masks.image, dtype=bool)}
    assert len(kept) == len(table.labels)
    for union, keep in kept.items():
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
@pytest.mark.parametrize("patches", [1, 2])
@pytest.mark.parametrize("fill", [None, (0.2, 0.7, 0.9), (0.3,)])
@pytest.mark.parametrize("aware", [False, True])
def test_masked_copies_are_the_image_outside_the_windows_and_the_fill_inside(
    aware: bool, fill: tuple[float, ...] | None, patches: int, grid: str, resnet: nn.Module
) -> None:
    colours = Preprocessing(mean=(0.4, 0.5, 0.6), std=(0.2, 0.3, 0.4), fill=fill)
    classifier = TorchClassifier(resnet, colours)
    classifier.mask_aware = aware
    masked, draw = ExactEngine(classifier, grid=grid), torch.Generator().manual_seed(0)
    masks = MaskSet.build(Threat.square(5, count=patches), image=(20, 24), masks=2)
    subjects = [
        ImageState(masked.to_threat_grid(image), LabelTable(masks))
        for image in torch.rand(3, 3, 20, 24, generator=draw)
    ]
    before = [s.pixels.clone() for s in subjects]
    unions = np.array([*range(len(masks.unions)), UNMASKED])
    which = np.arange(len(unions)) % 3  # in any order
    got = masked.masked_inputs(PairBatch(subjects, which, unions))
    for row, s, union in zip(got, which, unions, strict=True):
        hidden = torch.zeros(20, 24, dtype=torch.bool)
        for w in () if union == UNMASKED else masks.unions.masks[union]:
            hidden[w.top : w.bottom, w.left : w.right] = True
        colour = torch.tensor(colours.source_fill(3) if grid == "source" else colours.input_fill(3))[:, None, None]
        want = torch.where(hidden, colour, before[s])
        want = colours(want[None])[0] if grid == "source" else want
        assert torch.equal(row, torch.cat([want, hidden[None].float()]) if aware else want)
    assert all(torch.equal(s.pixels, old) for s, old in zip(subjects, before, strict=True))


@pytest.mark.parametrize("aware", [False, True])
def test_masked_copies_of_rounded_images_are_rounded_masked_copies(aware: bool, resnet: nn.Module) -> None:
    colours = Preprocessing(mean=(0.4, 0.5, 0.6), std=(0.2, 0.3, 0.4), fill=(0.2, 0.7, 0.9))
    classifier = TorchClassifier(resnet, colours)
    classifier.mask_aware = aware
    way = HalfPrecisionBackend(classifier)
    assert way.input_dtype == torch.float16
    masks = MaskSet.build(Threat.square(5), image=(20, 24), masks=2)
    unions = np.array([*range(len(masks.unions)), UNMASKED])
    for grid in ("source", "input"):
        masked, draw = ExactEngine(classifier, grid=grid), torch.Generator().manual_seed(0)
        subjects = [
            ImageState(masked.to_threat_grid(image), LabelTable(masks))
            for image in torch.rand(3, 3, 20, 24, generator=draw)
        ]
        piece = PairBatch(subjects, np.sort(np.arange(len(unions)) % 3), unions)
        got, exact = masked.masked_inputs(piece, way.input_dtype), masked.masked_inputs(piece)
        assert exact.dtype == torch.float32
        assert got.dtype == (torch.float16 if grid == "input" else torch.float32)  # resizing is done in float32
        assert torch.equal(got.half(), exact.half())


def test_a_class_of_ones_own_is_given_its_inputs_as_they_are(resnet: nn.Module) -> None:
    class Own(TorchClassifier):
        def logits(self, inputs: Tensor) -> Tensor:
            return super().logits(inputs.flip(3))

    assert HalfPrecisionBackend(Own(resnet)).input_dtype is None
    assert Float8Backend(Own(resnet), HalfPrecisionBackend(Own(resnet))).input_dtype is None


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
def test_verdicts_do_not_depend_on_the_chunk_or_on_company(
    defense: type, chunk: int, classifier: TorchClassifier, mixed: list[Tensor]
) -> None:
    together = defense(classifier, Threat.square(6), masks=3).predict(mixed)
    alone = [defense(classifier, Threat.square(6), masks=3, chunk=chunk).predict([image])[0] for image in mixed]
    assert together == alone


class Counting(nn.Module):
    """Counts the rows it has seen, and keeps the largest batch."""

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


def test_labels_already_known_are_not_asked_for_again(resnet: nn.Module, preprocessing: Preprocessing) -> None:
    counting = Counting(resnet).eval()
    masked = ExactEngine(TorchClassifier(counting, preprocessing), grid="source")
    masks = MaskSet.build(Threat.square(6), image=(32, 32), masks=3)
    subject = ImageState(torch.rand(3, 32, 32, generator=torch.Generator().manual_seed(0)), LabelTable(masks))
    for unions, new in [([0, 1, 2], 3), ([2, 1], 0), ([2, 3, 3, 3], 1), ([], 0), ([UNMASKED], 1)]:
        before = counting.rows - masked.checks - masked.padding
        masked.compute([LabelRequest(subject, np.array(unions, dtype=np.intp))])
        assert counting.rows - masked.checks - masked.padding == before + new
    assert subject.table.spent == 5


class Cramped(Counting):
    """Runs out of memory above a number of images at a time, in the words of its device."""

    def __init__(self, inner: nn.Module, room: int, error: Exception) -> None:
        super().__init__(inner)
        self.room, self.error = room, error

    def forward(self, x: Tensor) -> Tensor:
        if len(x) > self.room:
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


def test_a_smaller_chunk_is_remembered(resnet: nn.Module, preprocessing: Preprocessing, mixed: list[Tensor]) -> None:
    cramped = Cramped(resnet, 5, OUT_OF_MEMORY[0]).eval()
    defense = DoubleMasking(TorchClassifier(cramped, preprocessing), Threat.square(6), masks=3)
    verdicts = defense.predict(mixed)
    remembered = defense.engine.exact.max_rows
    cramped.error = AssertionError("asked for more than fits, although that was known")
    assert defense.predict(mixed) == verdicts
    assert defense.engine.exact.max_rows == remembered


@pytest.mark.parametrize("error", OUT_OF_MEMORY, ids=["cuda", "cpu", "mps", "python"])
@pytest.mark.parametrize("chunk", [None, 1])
def test_no_room_for_a_single_image_is_said_with_its_shape(
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
    """Remembers how often it was asked."""

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
        found = defense.examine(images, sample.labels[::25], maps=True)
        tables[precision] = np.stack([e.table.labels for e in found])
    assert (tables["exact"] == tables["fast"]).all()
    stats = defense.engine.stats
    assert tables["fast"].size - stats.labels >= SAMPLE  # those learnt from were exact
    assert 0 < stats.rechecked < stats.labels / 2
    assert sum(e.table.rechecked for e in found) == stats.rechecked
    assert sum(e.table.flipped for e in found) == stats.flipped


@needs_half
def test_what_is_rechecked_in_a_batch_does_not_depend_on_the_batches_before() -> None:
    sample = load_dataset("sample")
    jobs = [
        Job(load_classifier("zoo:tiny", device="cpu"), sample, Threat.square(5), masks=2, precision="fast", table=True)
        for _ in range(2)
    ]
    first, second = map(CertifyWorkload, jobs)
    early, late = Batch(0, range(8)), Batch(1, range(8, 12))
    second.process(early, second.read(early))
    rows = first.process(late, first.read(late)), second.process(late, second.read(late))
    for one, other in zip(*rows, strict=True):
        assert one["margin"] == other["margin"]
        assert one["rechecked"] == other["rechecked"]


def test_a_module_that_cannot_bear_channels_last_is_run_without() -> None:
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


def test_a_module_that_wrote_into_its_inputs_before_it_failed_is_given_them_anew() -> None:
    class Writing(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.mul_(2.0).view(len(x), -1)[:, :2]

    images = torch.rand(2, 3, 8, 8)
    want = 2 * images.view(2, -1)[:, :2]
    with torch.inference_mode():
        given = images.contiguous(memory_format=torch.channels_last)
        assert torch.equal(TorchClassifier(Writing().eval()).logits(given), want)
