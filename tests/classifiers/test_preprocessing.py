"""Our resize, crop and normalise are those the model was trained with, and masks have the colour they should."""

import io

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from timm.data import IMAGENET_DEFAULT_MEAN as IMAGENET_MEAN
from timm.data import IMAGENET_DEFAULT_STD as IMAGENET_STD
from torchvision import models

from patchcleanser import Preprocessing, load_classifier
from patchcleanser.classifiers.preprocessing import checked_image
from patchcleanser.classifiers.timm import timm_preprocessing
from patchcleanser.data import decode
from patchcleanser.errors import ClassifierError, ImageError, InputError

STEP = 1 / 255
# Ours resizes floats; timm and torchvision resize 8-bit images, rounding after each of two passes (and clipping
# bicubic overshoot in between, which is felt at hard edges only).
MEAN_TOLERANCE = 0.5 * STEP
MAX_TOLERANCE = {"nearest": 1e-6, "bilinear": 1.05 * STEP, "bicubic": 6 * STEP}


@pytest.fixture(scope="module")
def photo() -> Image.Image:
    """A real photograph, 427×640."""
    datasets = pytest.importorskip("sklearn.datasets")
    return Image.fromarray(datasets.load_sample_image("china.jpg"))


def assert_matches(photo: Image.Image, size: tuple[int, int], theirs, ours: Preprocessing) -> None:
    """`theirs` takes the PIL image, `ours` the same pixels as floats; compared in units of [0, 1]."""
    height, width = size
    image = photo.resize((width, height), Image.Resampling.BICUBIC)
    want, got = theirs(image), ours(checked_image(image, 3)[None])[0]
    assert got.shape == want.shape
    off = (got - want).abs() * torch.tensor(ours.std)[:, None, None]
    assert off.mean() < MEAN_TOLERANCE
    assert off.max() < MAX_TOLERANCE[ours.interpolation]


SIZES = [(375, 500), (500, 375), (300, 300), (90, 120), (400, 257)]


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize(
    "name", ["test_vit", "test_resnet", "resnet10t", "vit_tiny_patch16_224", "mobilenetv3_small_050"]
)
def test_timms_own_transform_is_matched(name: str, size: tuple[int, int], photo: Image.Image) -> None:
    model = timm.create_model(name)
    config = timm.data.resolve_model_data_config(model)
    theirs = timm.data.create_transform(**config, is_training=False)
    assert_matches(photo, size, theirs, timm_preprocessing(model))


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("name", ["mobilenet_v2", "efficientnet_b0", "swin_t", "resnet18"])
def test_torchvisions_preset_is_matched(name: str, size: tuple[int, int], photo: Image.Image) -> None:
    ours = load_classifier(f"torchvision:{name}?weights=none", device="cpu").preprocessing
    theirs = models.get_model_weights(name).IMAGENET1K_V1.transforms()
    assert_matches(photo, size, theirs, ours)


@pytest.mark.parametrize("cut", range(8))
def test_the_centre_is_where_torchvision_cuts_it(cut: int, photo: Image.Image) -> None:
    ours = Preprocessing(200 + cut, (200, 200), "bilinear", IMAGENET_MEAN, IMAGENET_STD)
    theirs = models.ResNet18_Weights.IMAGENET1K_V1.transforms(crop_size=200, resize_size=200 + cut)
    assert_matches(photo, (300, 300), theirs, ours)


@pytest.mark.parametrize(
    ("size", "resize", "want"),
    [
        ((427, 640), 256, (256, 383)),
        ((640, 427), 256, (383, 256)),
        ((300, 300), 256, (256, 256)),
        ((100, 75), 256, (341, 256)),
        ((300, 200), (20, 30), (20, 30)),
        ((300, 200), None, (300, 200)),
    ],
)
def test_a_short_side_keeps_the_aspect_ratio_and_a_size_does_not(size, resize, want) -> None:
    assert Preprocessing(resize, interpolation="bilinear")(torch.rand(1, 3, *size)).shape[-2:] == want


@pytest.mark.parametrize(
    "same",
    [
        Preprocessing(),
        Preprocessing(resize=24),
        Preprocessing(resize=(24, 40)),
        Preprocessing(crop=(24, 40)),
        Preprocessing(resize=(24, 40), crop=(24, 40), interpolation="bilinear"),
        Preprocessing(resize=24, interpolation="nearest"),
    ],
    ids=str,
)
def test_images_that_have_the_right_size_are_not_touched(same: Preprocessing) -> None:
    images = torch.rand(2, 3, 24, 40, generator=torch.Generator().manual_seed(0))
    assert torch.equal(same(images), images)


def test_resized_images_stay_in_range() -> None:
    edges = (torch.arange(40)[:, None] // 10 + torch.arange(40) // 10) % 2 * torch.ones(1, 3, 40, 40)
    for side in (23, 64):
        resized = Preprocessing(resize=side)(edges)  # bicubic overshoots at edges
        assert resized.min() == 0
        assert resized.max() == 1


def test_images_of_a_batch_do_not_influence_each_other() -> None:
    images = torch.rand(5, 3, 33, 47, generator=torch.Generator().manual_seed(0))
    together = Preprocessing(24, (20, 20), mean=IMAGENET_MEAN, std=IMAGENET_STD)
    assert torch.equal(together(images), torch.cat([together(image[None]) for image in images]))


NORMAL = {"mean": IMAGENET_MEAN, "std": IMAGENET_STD}


@pytest.mark.parametrize("geometry", [{}, {"resize": 40, "crop": (32, 32)}, {"resize": (20, 70)}], ids=str)
@pytest.mark.parametrize("interpolation", ["nearest", "bilinear", "bicubic"])
@pytest.mark.parametrize(
    ("settings", "channels"),
    [
        ({}, 3),
        ({}, 1),
        (NORMAL, 3),
        ({**NORMAL, "fill": (0.1, 0.9, 0.3)}, 3),
        ({**NORMAL, "fill": (0.7,)}, 3),
        ({"fill": (0.0,)}, 3),
        ({"fill": (1.0, 0.0, 0.5)}, 3),
        ({"mean": (0.13,), "std": (0.31,)}, 1),
    ],
    ids=str,
)
def test_an_image_of_the_mask_colour_becomes_the_input_fill(
    settings: dict, channels: int, interpolation: str, geometry: dict
) -> None:
    preprocessing = Preprocessing(interpolation=interpolation, **geometry, **settings)
    source = torch.tensor(preprocessing.source_fill(channels))[:, None, None]
    prepared = preprocessing(source.expand(1, channels, 48, 57))
    want = torch.tensor(preprocessing.input_fill(channels))[:, None, None]
    assert (prepared - want).abs().max() < 1e-5


@pytest.mark.parametrize(
    ("preprocessing", "source", "input_"),
    [
        (Preprocessing(), (0.5, 0.5, 0.5), (0.5, 0.5, 0.5)),
        (Preprocessing(**NORMAL), IMAGENET_MEAN, (0.0, 0.0, 0.0)),
        (Preprocessing(mean=(0.5,) * 3, std=(0.5,) * 3, fill=(0.0,)), (0.0, 0.0, 0.0), (-1.0, -1.0, -1.0)),
        (Preprocessing(fill=(0.25,)), (0.25, 0.25, 0.25), (0.25, 0.25, 0.25)),
    ],
    ids=str,
)
def test_the_mask_colour_is_the_mean_unless_said_otherwise(preprocessing: Preprocessing, source, input_) -> None:
    assert preprocessing.source_fill(3) == pytest.approx(source)
    assert preprocessing.input_fill(3) == pytest.approx(input_)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"mean": (0.5,)}, r"mean and std come together, got mean=\(0\.5,\) and std=None"),
        ({"std": (0.5,)}, r"mean and std come together, got mean=None and std=\(0\.5,\)"),
        ({"mean": (0.5,) * 3, "std": (0.5,)}, "mean has 3 channels, std has 1"),
        ({"mean": (0.5,) * 3, "std": (0.5, 0.0, 0.5)}, r"std must be above 0, got \(0\.5, 0\.0, 0\.5\)"),
        ({"mean": (0.5,), "std": (-1.0,)}, r"std must be above 0, got \(-1\.0,\)"),
        ({**NORMAL, "fill": (0.5, 0.5)}, "fill has 2 channels, the classifier has 3"),
        ({"interpolation": "lanczos"}, "interpolation is nearest, bilinear or bicubic, got 'lanczos'"),
        ({"resize": 200, "crop": (224, 224)}, r"crop of \(224, 224\) does not fit .* short side of 200 px"),
        ({"resize": 200, "crop": (100, 224)}, r"crop of \(100, 224\) does not fit .* short side of 200 px"),
        ({"resize": 0}, r"resize is a short side or \(height, width\), at least 1 px, got 0"),
        ({"resize": 20.5}, r"resize is a short side or \(height, width\), at least 1 px, got 20\.5"),
        ({"resize": (32, -1)}, r"resize is a short side or .*, at least 1 px, got \(32, -1\)"),
        ({"resize": (20, 50), "crop": (32, 32)}, r"crop of \(32, 32\) does not fit images resized to \(20, 50\) px"),
        ({"crop": (0, 0)}, r"crop is \(height, width\), at least 1 px, got \(0, 0\)"),
        ({"crop": 224}, r"crop is \(height, width\), at least 1 px, got 224"),
        ({"crop_rounding": "up"}, "crop_rounding is even or down, got 'up'"),
        ({"fill": (2.0,)}, r"fill lies in \[0, 1\], as pixels do before normalising, got \(2\.0,\)"),
        ({"fill": (-0.1, 0.5, 0.5)}, r"fill lies in \[0, 1\], .*, got \(-0\.1, 0\.5, 0\.5\)"),
        ({"fill": ()}, r"fill is one finite number per channel, got \(\)"),
        ({"mean": (0.5,), "std": (float("nan"),)}, r"std is one finite number per channel, got \(nan,\)"),
        ({"mean": (float("inf"),), "std": (1.0,)}, r"mean is one finite number per channel, got \(inf,\)"),
    ],
)
def test_settings_that_make_no_sense_are_refused(settings: dict, words: str) -> None:
    with pytest.raises(InputError, match=words):
        Preprocessing(**settings)


@pytest.mark.parametrize(
    ("preprocessing", "size"),
    [
        (Preprocessing(crop=(32, 32)), (31, 40)),
        (Preprocessing(crop=(32, 32)), (40, 31)),
    ],
)
def test_a_crop_larger_than_the_image_is_refused(preprocessing: Preprocessing, size: tuple[int, int]) -> None:
    with pytest.raises(InputError, match=r"a crop of \(32, 32\) px does not fit an image of .* px; set resize="):
        preprocessing(torch.rand(1, 3, *size))


def test_a_timm_crop_mode_without_a_translation_is_refused() -> None:
    model = timm.create_model("test_resnet")
    model.pretrained_cfg = {**model.pretrained_cfg, "crop_mode": "border"}
    with pytest.raises(ClassifierError, match=r"crop mode 'border' at 160×160 is not known; pass preprocessing="):
        timm_preprocessing(model)


def test_a_squashed_timm_model_is_resized_without_a_crop() -> None:
    model = timm.create_model("test_resnet")
    model.pretrained_cfg = {**model.pretrained_cfg, "crop_mode": "squash"}
    got = timm_preprocessing(model)
    assert (got.resize, got.crop) == ((160, 160), None)


@pytest.mark.parametrize(("mode", "channels"), [("RGB", 3), ("L", 1), ("RGBA", 3), ("P", 3), ("1", 1), ("RGB", None)])
def test_pil_images_of_every_mode_become_floats(mode: str, channels: int | None) -> None:
    image = Image.fromarray(np.arange(24, dtype=np.uint8).reshape(2, 4, 3)).convert(mode)
    tensor = checked_image(image, channels)
    assert tensor.shape == (channels or 3, 2, 4)
    assert tensor.dtype == torch.float32
    assert tensor.min() >= 0
    assert tensor.max() <= 1
    if mode == "RGB":
        assert torch.equal((tensor * 255).round(), torch.arange(24.0).reshape(2, 4, 3).permute(2, 0, 1))


DEEP = np.array([[0, 257, 32896, 65535]], dtype=np.uint16)


def turned() -> Image.Image:
    """A camera held sideways: what is left in the file belongs on top."""
    image = Image.new("RGB", (4, 2))
    image.paste((255, 0, 0), (0, 0, 2, 2))
    image.getexif()[0x0112] = 6
    return image


@pytest.mark.parametrize("channels", [1, 3])
def test_deep_gray_is_not_clipped(channels: int) -> None:
    tensor = checked_image(Image.fromarray(DEEP), channels)
    assert tensor.shape == (channels, 1, 4)
    assert torch.allclose(tensor[0, 0] * 255, torch.tensor([0.0, 1.0, 128.0, 255.0]))


def test_transparent_pixels_are_seen_over_white() -> None:
    image = Image.new("RGBA", (2, 1), (255, 0, 0, 0))
    image.putpixel((1, 0), (255, 0, 0, 255))
    assert checked_image(image, 3)[:, 0].T.tolist() == [[1, 1, 1], [1, 0, 0]]
    assert checked_image(image, 1)[0, 0, 0] == 1


def test_a_picture_is_turned_as_its_exif_says_and_stays_as_it_was() -> None:
    image = turned()
    tensor = checked_image(image, 3)
    assert tensor.shape == (3, 4, 2)
    assert tensor[0, 0, 0] == 1
    assert tensor[0, 3, 0] == 0
    assert image.size == (4, 2)
    assert image.getexif()[0x0112] == 6


@pytest.mark.parametrize("image", [turned(), Image.fromarray(DEEP), Image.new("LA", (2, 2), (9, 51))])
def test_a_picture_from_memory_and_its_file_are_the_same_pixels(image: Image.Image) -> None:
    file = io.BytesIO()
    image.save(file, "PNG", exif=image.getexif())
    assert torch.equal(checked_image(image, 3), decode(file.getvalue(), "file"))


@pytest.mark.parametrize(
    ("array", "words"),
    [
        (np.array([[0, 70000]], dtype=np.int32), "image 4 cannot be read: gray values of 32 bits"),
        (np.array([[0, 255]], dtype=np.float32), "image 4 cannot be read: its values go from 0 to 255"),
    ],
)
def test_gray_without_an_agreed_white_is_refused(array: np.ndarray, words: str) -> None:
    with pytest.raises(ImageError, match=words):
        checked_image(Image.fromarray(array), 3, 4)


def test_a_picture_whose_file_is_cut_is_refused_with_its_number() -> None:
    file = io.BytesIO()
    Image.new("RGB", (64, 64)).save(file, "JPEG")
    with pytest.raises(ImageError, match=r"image 2 cannot be read: .*truncated"):
        checked_image(Image.open(io.BytesIO(file.getvalue()[:-40])), 3, 2)
