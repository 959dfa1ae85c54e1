"""What goes wrong is said in our own words: what, got, limit, fix. Never a bare traceback of a dependency."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchvision import transforms

from patchcleanser import (
    CallableClassifier,
    DoubleMasking,
    Job,
    MaskSet,
    MinorityReports,
    Preprocessing,
    Threat,
    TorchClassifier,
    Window,
    evaluate,
)
from patchcleanser.attacks import AttackSettings
from patchcleanser.errors import (
    CoverError,
    ImageError,
    InputError,
    LabelError,
    MaskError,
    OutputError,
    ThreatError,
    TrainModeError,
)

THREAT = Threat.square(4)
PAIRS = [(torch.zeros(3, 16, 16), 0)]
RGB = Preprocessing(mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5))


class Means(nn.Module):
    """Channel means as three logits: takes images of any size."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mean(dim=(2, 3))[:, :3]


@pytest.fixture
def defense() -> DoubleMasking:
    return DoubleMasking(TorchClassifier(Means().eval(), RGB), THREAT, masks=2)


@pytest.fixture
def images() -> Tensor:
    return torch.rand(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))


def with_pixel(value: float) -> Tensor:
    image = torch.full((1, 3, 16, 16), 0.5)
    image[0, 1, 2, 3] = value
    return image


BAD_IMAGES = [
    ("empty tensor", torch.rand(0, 3, 16, 16), r"a batch needs at least 1 image, got shape \(0, 3, 16, 16\)"),
    ("empty array", np.zeros((0, 3, 16, 16)), r"a batch needs at least 1 image, got shape \(0, 3, 16, 16\)"),
    ("empty list", [], "a batch needs at least 1 image, got none"),
    ("empty generator", (image for image in ()), "a batch needs at least 1 image, got none"),
    (
        "8-bit tensor",
        torch.zeros(1, 3, 16, 16, dtype=torch.uint8),
        r"image 0 has type torch\.uint8 .*; pass images / 255$",
    ),
    ("8-bit array", np.zeros((1, 3, 16, 16), np.uint8), r"image 0 has type torch\.uint8 .*; pass images / 255$"),
    (
        "whole numbers",
        torch.zeros(1, 3, 16, 16, dtype=torch.int64),
        r"image 0 has type torch\.int64 .*; pass floats in \[0, 1\]$",
    ),
    ("booleans", torch.zeros(1, 3, 16, 16, dtype=torch.bool), r"image 0 has type torch\.bool"),
    ("complex", torch.zeros(1, 3, 16, 16, dtype=torch.complex64), r"image 0 has type torch\.complex64"),
    ("too bright", with_pixel(1.5), r"image 0 has values from 0\.5 to 1\.5; pixels lie in \[0, 1\]"),
    ("8-bit range", with_pixel(255.0), r"image 0 has values from 0\.5 to 255; pixels lie in \[0, 1\]"),
    ("too dark", with_pixel(-0.01), r"image 0 has values from -0\.01 to 0\.5"),
    ("infinite", with_pixel(float("inf")), r"image 0 has values from 0\.5 to inf"),
    ("NaN", with_pixel(float("nan")), r"image 0 has NaN; pixels lie in \[0, 1\]"),
    (
        "8-bit HWC array",
        np.zeros((1, 16, 20, 3), np.uint8),
        r"image 0 has type torch\.uint8 and shape \(16, 20, 3\); pass Image\.fromarray\(image\)$",
    ),
    (
        "8-bit values",
        torch.full((1, 3, 16, 16), 200.0),
        r"200; pixels lie in \[0, 1\]: divide them by 255",
    ),
    ("loader", DataLoader([torch.rand(3, 16, 16)] * 4, 2), r"a DataLoader gives batches; .*\.score\(loader\)"),
    ("grey", torch.rand(1, 1, 16, 16), "image 0 has 1 channels, the classifier's mean and std have 3$"),
    ("with alpha", torch.rand(1, 4, 16, 16), "image 0 has 4 channels, the classifier's mean and std have 3$"),
    ("HWC tensor", torch.rand(1, 16, 20, 3), r"looks like \[H, W, C\]; channels come first"),
    ("HWC array", np.random.default_rng(0).random((1, 16, 20, 3)), r"looks like \[H, W, C\]; channels come first"),
    ("list of HWC", [np.zeros((16, 20, 3))], r"looks like \[H, W, C\]; channels come first"),
    ("one image", torch.rand(3, 16, 16), r"\[N, C, H, W\], got \(3, 16, 16\); put the one image into a list"),
    ("five axes", torch.rand(1, 1, 3, 16, 16), r"a batch of images has shape \[N, C, H, W\], got \(1, 1, 3, 16, 16\)"),
    ("matrix", np.zeros((16, 16)), r"a batch of images has shape \[N, C, H, W\], got \(16, 16\)"),
    ("number", torch.tensor(1.0), r"a batch of images has shape \[N, C, H, W\], got \(\)"),
    (
        "list of matrices",
        [torch.rand(16, 16)],
        r"image 0 has shape \(16, 16\); one image is \[channels, height, width\]",
    ),
    ("list of batches", [torch.rand(1, 3, 16, 16)], r"image 0 has shape \(1, 3, 16, 16\); one image is"),
    ("no pixels", torch.rand(1, 3, 0, 16), r"image 0 has no pixels: shape \(3, 0, 16\)"),
    ("path", "photo.jpg", "images come as a batch .* or a list of images, got str"),
    ("bytes", b"\x89PNG", "or a list of images, got bytes"),
    ("bare PIL image", Image.new("RGB", (16, 16)), "or a list of images, got Image; put the one image into a list"),
    ("None", None, "or a list of images, got NoneType"),
    ("int", 3, "or a list of images, got int"),
    ("list of paths", ["photo.jpg"], "image 0 is a str; pass a tensor, an array or a PIL image"),
    ("list of lists", [[[0.5]]], "image 0 is a list; pass a tensor, an array or a PIL image"),
    ("list of None", [None], "image 0 is a NoneType"),
    ("array of text", np.full((1, 3, 16, 16), "a"), r"image 0 has type <U1; pass floats in \[0, 1\]"),
    ("array of objects", np.full((1, 3, 16, 16), None), r"image 0 has type object; pass floats in \[0, 1\]"),
    ("second is bad", [torch.rand(3, 16, 16), torch.rand(3, 16, 16) + 1], "image 1 has values from"),
]


@pytest.mark.parametrize(("images", "words"), [pytest.param(*c[1:], id=c[0]) for c in BAD_IMAGES])
def test_bad_images_are_refused_by_predict(images: Any, words: str, defense: DoubleMasking) -> None:
    with pytest.raises(ImageError, match=words):
        defense.predict(images)


@pytest.mark.parametrize(("images", "words"), [pytest.param(*c[1:], id=c[0]) for c in BAD_IMAGES if c[0] != "number"])
def test_bad_images_are_refused_by_certify(images: Any, words: str, defense: DoubleMasking) -> None:
    with pytest.raises(ImageError, match=words):
        defense.certify(images, [0] * (len(images) if hasattr(images, "__len__") else 1))


def test_a_number_is_refused_by_certify(defense: DoubleMasking) -> None:
    with pytest.raises(ImageError, match=r"a batch of images has shape \[N, C, H, W\], got \(\)"):
        defense.certify(torch.tensor(1.0), [0])


@pytest.mark.parametrize("kind", ["flipped", "read-only", "big-endian"])
def test_any_array_of_floats_is_taken(kind: str, defense: DoubleMasking, images: Tensor) -> None:
    array = images.numpy().copy()
    if kind == "read-only":
        array.setflags(write=False)
    given = {"flipped": array[..., ::-1], "read-only": array, "big-endian": array.astype(">f4")}[kind]
    assert defense.predict(given) == defense.predict(torch.from_numpy(given.astype(np.float32)))


def test_a_bad_image_in_a_stream_is_named_by_its_number(defense: DoubleMasking) -> None:
    def stream():
        for n in range(200):
            yield torch.full((3, 16, 16), float(n == 150) * 2)

    with pytest.raises(ImageError, match="image 150 has values from 2 to 2"):
        defense.predict(stream())


@pytest.mark.parametrize(
    ("labels", "words"),
    [
        ([0, 3], "label 3 is out of range; the classifier has classes 0 to 2"),
        ([-1, 0], "label -1 is out of range; the classifier has classes 0 to 2"),
        (torch.tensor([0, 10**12]), "label 1000000000000 is out of range"),
        ([0.0, 1.0], r"a label is a class index \(int\), got 0\.0 of type float"),
        (torch.tensor([0.0, 1.0]), r"a label is a class index \(int\), got 0\.0 of type float"),
        (np.array([0.5, 1]), r"a label is a class index \(int\), got 0\.5 of type float"),
        ([True, False], "a label is a class index .*, got True of type bool"),
        (torch.tensor([True, False]), "a label is a class index .*, got True of type bool"),
        (np.array([True, False]), "a label is a class index .*, got True of type bool"),
        ([np.True_, np.False_], "a label is a class index .* of type bool"),
        (["cat", "dog"], "a label is a class index .*, got 'cat' of type str"),
        ([None, 0], "a label is a class index .*, got None of type NoneType"),
        (torch.tensor([[0], [1]]), r"a label is a class index .*, got \[0\] of type list"),
        ([0], "1 label for 2 images"),
        ([0, 1, 2], "3 labels for 2 images"),
        ([], "0 labels for 2 images"),
        ([torch.tensor(0.0), torch.tensor(1.2)], r"a label is a class index .*, got 0\.0 of type float"),
        ([torch.tensor(True), torch.tensor(False)], "a label is a class index .*, got True of type bool"),
        ([torch.tensor([0]), torch.tensor([1])], r"a label is a class index .*, got \[0\] of type list"),
        (1, "labels are a list of class indices, one for each image, got 1"),
        (torch.tensor(1), "labels are a list of class indices, one for each image, got 1"),
        (None, "labels are a list of class indices, one for each image, got None"),
        ({0: 5, 1: 7}, "labels are a list of class indices, one for each image, got {0: 5, 1: 7}"),
        ({0, 1}, "labels are a list of class indices, one for each image, got {0, 1}"),
    ],
)
def test_bad_labels_are_refused(labels: Any, words: str, defense: DoubleMasking, images: Tensor) -> None:
    with pytest.raises(LabelError, match=words):
        defense.certify(images, labels)


@pytest.mark.parametrize(("count", "words"), [(1, "1 label for at least 2 images"), (3, "3 labels for 2 images")])
def test_labels_are_counted_for_streams_too(count: int, words: str, defense: DoubleMasking, images: Tensor) -> None:
    with pytest.raises(LabelError, match=words):
        defense.certify(iter(images), [0] * count)


@pytest.mark.parametrize(
    "kind", [list, tuple, np.array, torch.tensor, iter, lambda labels: [np.int64(n) for n in labels]]
)
def test_whole_numbers_of_every_kind_are_labels(
    kind: Callable[[list[int]], Any], defense: DoubleMasking, images: Tensor
) -> None:
    assert [c.label for c in defense.certify(images, kind([0, 1]))] == [0, 1]


class Nameless(nn.Sequential):
    """Its layers have no names."""

    def named_modules(self, memo: Any = None, prefix: str = "", remove_duplicate: bool = True) -> Any:
        yield prefix, self


def one_child_in_train_mode(kind: type[nn.Sequential] = nn.Sequential) -> nn.Module:
    module = kind(nn.Conv2d(3, 4, 3), nn.Sequential(nn.Dropout(0.5), nn.Flatten())).eval()
    module[1][0].train()
    return module


@pytest.mark.parametrize(
    ("module", "words"),
    [
        (nn.Sequential(nn.Flatten(), nn.Dropout()).train(), r"the model is in train mode; call model\.eval\(\) first"),
        (one_child_in_train_mode(), r"layer '1\.0' \(Dropout\) is in train mode; call model\.eval\(\) first"),
        (one_child_in_train_mode(Nameless), r"layer \(Dropout\) is in train mode; call model\.eval\(\) first"),
        (
            nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4, track_running_stats=False)).eval(),
            r"layer '1' \(BatchNorm2d\) normalises with batch statistics even in eval mode; use track_running_stats",
        ),
        (nn.BatchNorm2d(3, track_running_stats=False).eval(), "the model normalises with batch statistics"),
    ],
    ids=["whole model", "one child", "a child without a name", "batch statistics", "nothing but batch statistics"],
)
def test_train_mode_and_batch_statistics_are_refused(module: nn.Module, words: str) -> None:
    for wrap in (TorchClassifier, lambda m: DoubleMasking(m, THREAT), lambda m: MinorityReports(m, THREAT)):
        with pytest.raises(TrainModeError, match=words):
            wrap(module)


@pytest.mark.parametrize("verb", ["predict", "certify"])
def test_a_model_that_goes_back_to_train_mode_is_refused(verb: str, images: Tensor) -> None:
    module = Means().eval()
    defense = DoubleMasking(module, THREAT, masks=2)
    arguments = (images, [0, 1]) if verb == "certify" else (images,)
    getattr(defense, verb)(*arguments)
    module.train()
    with pytest.raises(TrainModeError, match="the model is in train mode"):
        getattr(defense, verb)(*arguments)


@pytest.mark.parametrize(
    ("threat", "words"),
    [
        (Threat.square(20), "image 0: patch of 20 px does not fit an image side of 16 px"),
        (Threat.rectangle(4, 17), "image 0: patch of 17 px does not fit an image side of 16 px"),
        (Threat.rectangle(17, 4), "image 0: patch of 17 px does not fit an image side of 16 px"),
        (Threat.square(4, region=Window(10, 10, 8, 8)), "image 0: region 8×8 at row 10.* outside an image of 16×16 px"),
    ],
    ids=str,
)
def test_a_patch_that_does_not_fit_is_refused_with_both_sizes(threat: Threat, words: str, images: Tensor) -> None:
    with pytest.raises(ThreatError, match=words):
        DoubleMasking(Means().eval(), threat, masks=2).predict(images)


def test_the_image_that_is_too_small_is_named() -> None:
    stream = [torch.rand(3, 16, 16), torch.rand(3, 16, 16), torch.rand(3, 16, 3)]
    with pytest.raises(ThreatError, match="image 2: patch of 4 px does not fit an image side of 3 px"):
        DoubleMasking(Means().eval(), THREAT, masks=2).predict(stream)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"masks": 0}, "masks is a whole number of at least 1, or one for each axis, got 0"),
        ({"masks": -3}, "masks is a whole number of at least 1, .*, got -3"),
        ({"masks": (2, 0)}, r"masks is a whole number of at least 1, .*, got \(2, 0\)"),
        ({"masks": (1, 2, 3)}, r"masks is a whole number of at least 1, .*, got \(1, 2, 3\)"),
        ({"masks": 2.5}, r"masks is a whole number of at least 1, .*, got 2\.5"),
        ({"masks": "six"}, "masks is a whole number of at least 1, .*, got 'six'"),
        ({"masks": True}, "masks is a whole number of at least 1, .*, got True"),
        ({"stride": 0}, "stride is a whole number of at least 1, or one for each axis, got 0"),
        ({"masks": 2, "stride": 3}, r"give masks \(--masks\) or stride \(--stride\), not both; got 2×2 and 3×3"),
    ],
    ids=str,
)
def test_mask_counts_that_are_none_are_refused_at_once(options: dict, words: str) -> None:
    with pytest.raises(MaskError, match=words):
        DoubleMasking(Means().eval(), THREAT, **options)


@pytest.mark.parametrize("chunk", [0, -1, "16", 2.5])
def test_a_chunk_that_is_no_number_of_images_is_refused(chunk: Any) -> None:
    with pytest.raises(MaskError, match=f"chunk is at least 1 image at a time, got {chunk!r}"):
        DoubleMasking(Means().eval(), THREAT, chunk=chunk)


WHOLE = MaskSet((16, 16), ((Window(0, 0, 16, 16),),))
HALVES = MaskSet((16, 16), ((Window(0, 0, 16, 8),), (Window(0, 8, 16, 8),)))


def test_a_mask_set_that_does_not_cover_is_refused_with_a_patch_it_misses() -> None:
    words = r"does not cover the threat \(4x4 patch\): no mask hides the patch 4×4 at row 0, column 5"
    with pytest.raises(CoverError, match=words):
        DoubleMasking(Means().eval(), THREAT, mask_set=HALVES)


def test_a_mask_set_for_another_size_is_refused() -> None:
    defense = DoubleMasking(Means().eval(), THREAT, mask_set=WHOLE)
    with pytest.raises(MaskError, match="image 0: the given mask set is for images of 16×16 px, got 16×20 px"):
        defense.predict(torch.rand(1, 3, 16, 20))


@pytest.mark.parametrize("option", [{"masks": 2}, {"stride": 2}], ids=str)
def test_a_mask_set_and_a_recipe_for_one_are_refused_together(option: dict) -> None:
    with pytest.raises(MaskError, match="give mask_set= or masks=/stride=, not both"):
        DoubleMasking(Means().eval(), THREAT, mask_set=WHOLE, **option)


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (3, "got int"),
        (None, "got NoneType"),
        ([Means().eval()], "got list"),
        ("resnet50", "cannot read classifier"),
        (nn.Linear(3, 2).state_dict(), "a network, got its weights .OrderedDict.; load them into a module first"),
    ],
    ids=["int", "None", "list", "bare name", "state dict"],
)
def test_what_is_no_classifier_is_refused(model: Any, words: str) -> None:
    with pytest.raises(InputError, match=words):
        DoubleMasking(model, THREAT)


@pytest.mark.parametrize("threat", [3.2, "32cm", None, (4, 4)])
def test_what_is_no_threat_is_refused(threat: Any) -> None:
    with pytest.raises(ThreatError, match="12x83"):
        DoubleMasking(Means().eval(), threat)


def test_input_errors_are_value_errors_too(defense: DoubleMasking) -> None:
    with pytest.raises(ValueError, match="at least 1 image"):
        defense.predict([])


def test_a_fill_for_another_number_of_channels_is_refused() -> None:
    shapes: list[tuple[int, ...]] = []

    def function(array: np.ndarray) -> np.ndarray:
        shapes.append(array.shape[1:])
        return array.reshape(len(array), -1)[:, :2]

    classifier = CallableClassifier(function, Preprocessing(fill=(0.0, 0.5, 1.0)))
    with pytest.raises(InputError, match=r"the mask colour \(0\.0, 0\.5, 1\.0\) has 3 channels, the images have 1"):
        DoubleMasking(classifier, THREAT, masks=2).predict(torch.rand(1, 1, 16, 16))
    assert not shapes


def test_a_list_is_a_number_of_masks_for_each_axis() -> None:
    lists, tuples = (DoubleMasking(Means().eval(), THREAT, masks=kind((3, 2))) for kind in (list, tuple))
    assert lists.mask_set((16, 16)) == tuples.mask_set((16, 16))
    jobs = [Job(Means().eval(), PAIRS, THREAT, masks=kind((3, 2))) for kind in (list, tuple)]
    assert jobs[0].identity == jobs[1].identity


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: TorchClassifier(Means().eval(), transforms.Normalize(0.5, 0.5)), "is Preprocessing.*got Normalize"),
        (lambda: CallableClassifier(Means(), {"mean": (0.5,)}), "is Preprocessing.*got dict"),
        (lambda: TorchClassifier(Means().eval(), lambda x: x), "is Preprocessing.*got function"),
        (lambda: Preprocessing(mean=0.5, std=0.5), "mean is one finite number per channel, got 0.5; write"),
        (lambda: Preprocessing(mean=("0.5",), std=(1,)), "mean is one finite number per channel"),
        (lambda: AttackSettings(iterations="10"), "iterations is a whole number of at least 1, got '10'"),
        (lambda: AttackSettings(locations=2.5), "locations is a whole number of at least 1, got 2.5"),
        (lambda: AttackSettings(restarts=None), "restarts is a whole number of at least 1, got None"),
        (lambda: MinorityReports(Means().eval(), THREAT, threshold="0.5"), r"threshold lies in \[0, 1\], got '0.5'"),
        (lambda: MinorityReports(Means().eval(), THREAT, threshold=float("nan")), "threshold lies in .*, got nan"),
        (lambda: Window(0.5, 0, 3, 3), "the top of a window is a whole number of px, got 0.5"),
        (lambda: Window(0, 0, "3", 3), "the height of a window is a whole number of px, got '3'"),
        (lambda: DoubleMasking(Means().eval(), 5.5), "got the float 5.5"),
        (lambda: evaluate(Job(Means().eval(), PAIRS, THREAT), "run", batch=0), "batch is .*, got 0"),
    ],
)  # fmt: skip
def test_options_of_a_wrong_type_are_refused_at_once(make: Callable[[], Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        make()


def test_values_that_are_no_probabilities_are_refused_on_clean_images_and_silence_nothing_under_attack() -> None:
    def spread(array: np.ndarray) -> np.ndarray:
        share = array.mean((1, 2, 3), dtype=np.float64) * 3 - 1  # from -1 to 2
        return np.stack([share, 1 - share], 1)

    defense = DoubleMasking(CallableClassifier(spread, outputs="probabilities"), THREAT, masks=2)
    bright, middle = torch.ones(1, 3, 16, 16), torch.full((1, 3, 16, 16), 0.5)
    assert defense.certify(middle, [0])[0].label == 0
    with pytest.raises(OutputError, match="NaN"):
        defense.certify(bright, [0])
    assert defense.predict(bright)[0].label in (0, 1)


def test_a_softmax_before_minority_reports_is_warned_about(caplog: pytest.LogCaptureFixture) -> None:
    network = nn.Sequential(nn.Flatten(), nn.Linear(3 * 16 * 16, 4))
    MinorityReports(network.eval(), THREAT)
    assert not caplog.text
    MinorityReports(nn.Sequential(network, nn.Softmax(1)).eval(), THREAT)
    assert "take the softmax out" in caplog.text


def test_a_mask_set_that_is_none_is_refused() -> None:
    with pytest.raises(MaskError, match=r"mask_set is a MaskSet\(.*, got ndarray"):
        DoubleMasking(Means().eval(), THREAT, mask_set=np.zeros((16, 16)))  # type: ignore[arg-type]


def test_a_mask_set_that_hides_everything_is_warned_about(caplog: pytest.LogCaptureFixture) -> None:
    DoubleMasking(Means().eval(), THREAT, mask_set=WHOLE)
    assert "a mask hides the whole image of 16×16 px" in caplog.text


def test_defenses_print_their_options() -> None:
    model = TorchClassifier(Means().eval())
    texts = [
        repr(DoubleMasking(model, THREAT, masks=4, coarse=2).as_module()),
        repr(DoubleMasking(model, THREAT, stride=3)),
        repr(MinorityReports(model, THREAT, mask_set=WHOLE, threshold=0.9)),
    ]
    assert "4x4 patch, masks=4, coarse=2)" in texts[0]
    assert texts[1].endswith("4x4 patch, stride=3)")
    assert texts[2].endswith("mask_set=MaskSet(1 mask for images of 16×16 px), threshold=0.9)")
