"""One model, many ways in: every adapter must give the same labels, logits and certificates."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional
from torchvision import models

from patchcleanser import (
    CallableClassifier,
    Case,
    ChallengerMasking,
    DoubleMasking,
    MaskSet,
    MinorityReports,
    Preprocessing,
    Threat,
    TorchClassifier,
    load_classifier,
)
from patchcleanser.classifiers import Classifier, as_classifier
from patchcleanser.classifiers.onnx import OnnxClassifier
from patchcleanser.classifiers.transformers import TransformersClassifier, processor_preprocessing
from patchcleanser.errors import ClassifierError

LOGIT_TOLERANCE = 1e-4
THREAT = Threat.square(6)

ADAPTERS = [
    "as_classifier",
    "timm safetensors",
    "timm pth",
    "timm nested pth with a DataParallel prefix",
    "onnx dynamic batch",
    "onnx batch 1",
    "onnx batch 4",
    "callable numpy",
    "callable torch",
    "callable probabilities",
]


def export(module: nn.Module, path: Path, batch: int | None) -> Path:
    """Write an ONNX file for a fixed batch size, or for any."""
    example = torch.rand(batch or 2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    shapes = {"x": {0: torch.export.Dim("batch")}} if batch is None else None
    torch.onnx.export(module, (example,), path, dynamo=True, verbose=False, dynamic_shapes=shapes)
    return path


@pytest.fixture(scope="module")
def world(
    tmp_path_factory: pytest.TempPathFactory,
    make_resnet: Callable[[], nn.Module],
    preprocessing: Preprocessing,
    coloured: Callable[..., tuple[Tensor, Tensor]],
) -> SimpleNamespace:
    """The model, its files and images, with the logits that a plain forward pass gives."""
    folder, module = tmp_path_factory.mktemp("weights"), make_resnet()
    save_file(module.state_dict(), folder / "m.safetensors")
    torch.save(module.state_dict(), folder / "m.pth")
    nested = {"epoch": 3, "state_dict": {f"module.{k}": v for k, v in module.state_dict().items()}}
    torch.save(nested, folder / "nested.pth")
    images, truths = coloured(12, (40, 36), seed=5, clutter=0.3)
    with torch.no_grad():
        logits = module(preprocessing(images))
    return SimpleNamespace(
        folder=folder,
        module=module,
        preprocessing=preprocessing,
        images=images,
        truths=truths,
        logits=logits,
        certificates=DoubleMasking(TorchClassifier(module, preprocessing), THREAT, masks=3).certify(
            images, truths, maps=True
        ),
    )


@pytest.fixture(scope="module")
def built() -> dict[str, Classifier]:
    """Adapters built so far, so that each ONNX file is exported once."""
    return {}


@pytest.fixture
def adapter(request: pytest.FixtureRequest, world: SimpleNamespace, built: dict[str, Classifier]) -> Classifier:
    name = request.param
    if name not in built:
        built[name] = build(name, world)
    return built[name]


def build(name: str, world: SimpleNamespace) -> Classifier:
    module, preprocessing, folder = world.module, world.preprocessing, world.folder

    def through_numpy(array: np.ndarray) -> np.ndarray:
        assert array.dtype == np.float32
        return module(torch.from_numpy(array)).numpy()

    def through_softmax(array: np.ndarray) -> np.ndarray:
        return module(torch.from_numpy(array)).double().softmax(dim=1).numpy()

    timm = "timm:test_resnet?num_classes=10&size=32&weights="
    match name:
        case "as_classifier":
            return as_classifier(TorchClassifier(module, preprocessing))
        case "timm safetensors":
            return load_classifier(f"{timm}{folder / 'm.safetensors'}", device="cpu")
        case "timm pth":
            return load_classifier(f"{timm}{folder / 'm.pth'}", device="cpu")
        case "timm nested pth with a DataParallel prefix":
            return load_classifier(f"{timm}{folder / 'nested.pth'}", device="cpu")
        case "onnx dynamic batch" | "onnx batch 1" | "onnx batch 4":
            batch = {"onnx dynamic batch": None, "onnx batch 1": 1, "onnx batch 4": 4}[name]
            path = export(module, folder / f"batch-{batch}.onnx", batch)
            return load_classifier(f"onnx:{path}", device="cpu", preprocessing=preprocessing)
        case "callable numpy":
            return CallableClassifier(through_numpy, preprocessing)
        case "callable torch":
            return CallableClassifier(module, preprocessing, array="torch")
        case "callable probabilities":
            return CallableClassifier(through_softmax, preprocessing, outputs="probabilities")
    raise AssertionError(name)


@pytest.mark.parametrize("adapter", ADAPTERS, indirect=True)
def test_every_adapter_gives_the_same_logits_and_labels(adapter: Classifier, world: SimpleNamespace) -> None:
    with torch.inference_mode():
        logits = adapter.checked_logits(adapter.prepare(world.images))
    want = world.logits
    if getattr(adapter, "outputs", "logits") == "probabilities":
        want = want.log_softmax(dim=1)
    assert (logits - want).abs().max() < LOGIT_TOLERANCE
    assert logits.argmax(dim=1).tolist() == world.logits.argmax(dim=1).tolist()
    assert adapter.classes == 10


@pytest.mark.parametrize("adapter", ADAPTERS, indirect=True)
def test_every_adapter_gives_the_same_certificates(adapter: Classifier, world: SimpleNamespace) -> None:
    certificates = DoubleMasking(adapter, THREAT, masks=3).certify(world.images, world.truths, maps=True)
    for got, want in zip(certificates, world.certificates, strict=True):
        assert (got.certified, got.row_certified) == (want.certified, want.row_certified)
        assert (got.failing_pair, got.classifications) == (want.failing_pair, want.classifications)
        assert got.positions.keys() == want.positions.keys()
        assert all((got.positions[shape] == want.positions[shape]).all() for shape in want.positions)
        assert got.margin == pytest.approx(want.margin, abs=1e-3)


def test_the_certificates_compared_above_are_not_all_alike(world: SimpleNamespace) -> None:
    assert {c.certified for c in world.certificates} == {True, False}
    assert min(c.margin for c in world.certificates) > 1e-3  # no label hangs on rounding


def test_timm_preprocessing_is_read_from_the_model(world: SimpleNamespace, preprocessing: Preprocessing) -> None:
    path = world.folder / "m.safetensors"
    assert load_classifier(f"timm:test_resnet?num_classes=10&size=32&weights={path}").preprocessing == preprocessing
    default = load_classifier(f"timm:test_resnet?num_classes=10&weights={path}").preprocessing
    assert (default.resize, default.crop) == (168, (160, 160))  # floor(160 / 0.95)


def test_query_overrides_reach_timm() -> None:
    classifier = load_classifier("timm:vit_tiny_patch16_224?img_size=32&patch_size=4&num_classes=10&weights=none")
    assert classifier.preprocessing.resize == (32, 32)
    assert classifier.preprocessing.crop is None
    with torch.inference_mode():
        assert classifier.checked_logits(classifier.prepare(torch.rand(2, 3, 32, 32))).shape == (2, 10)
        assert classifier.prepare(torch.rand(1, 3, 50, 70)).shape == (1, 3, 32, 32)
    assert classifier.module.patch_embed.patch_size == (4, 4)


def test_keyword_options_win_over_the_query() -> None:
    classifier = load_classifier("timm:test_resnet?num_classes=10&weights=none", num_classes=7)
    assert classifier.classes == 7


def test_a_classifier_carries_the_spec_that_loads_it() -> None:
    spec = "mirror:zoo:tiny"
    assert (load_classifier(spec, device="cpu").spec, as_classifier("zoo:tiny").spec) == (spec, "zoo:tiny")
    assert load_classifier("net:tiny", device="cpu", classes=7).spec is None  # the string alone loads another one
    assert TorchClassifier(nn.Flatten().eval()).spec is None


def test_a_timm_model_of_one_channel_takes_grey_images() -> None:
    classifier = load_classifier("timm:test_resnet?in_chans=1&num_classes=4&size=32&weights=none", device="cpu")
    verdicts = DoubleMasking(classifier, THREAT, masks=2).predict(torch.rand(1, 1, 32, 32))
    assert len(verdicts) == 1
    assert classifier.preprocessing.mean == (0.5,)


@pytest.mark.parametrize("suffix", ["safetensors", "pth"])
def test_torchvision_loads_a_weight_file(suffix: str, tmp_path: Path, coloured: Callable[..., tuple[Tensor, Tensor]]):
    torch.manual_seed(3)
    module = models.get_model("squeezenet1_1", weights=None, num_classes=5).eval()
    path = tmp_path / f"squeeze.{suffix}"
    save = save_file if suffix == "safetensors" else torch.save
    save(module.state_dict(), path)
    classifier = load_classifier(f"torchvision:squeezenet1_1?num_classes=5&size=64&weights={path}", device="cpu")
    images, _ = coloured(3, (64, 64), seed=2)
    with torch.inference_mode():
        inputs = classifier.prepare(images)
        assert torch.allclose(classifier.checked_logits(inputs), module(inputs), atol=1e-6)
    assert classifier.preprocessing.resize == (64, 64)
    assert classifier.preprocessing.mean == (0.485, 0.456, 0.406)


def test_torchvision_without_weights_keeps_the_published_preprocessing() -> None:
    classifier = load_classifier("torchvision:mobilenet_v3_small?weights=none", device="cpu")
    assert classifier.names is not None
    assert (len(classifier.names), classifier.names[0]) == (
        1000,
        "tench",
    )  # so that parts of ImageNet find their classes
    preset = models.MobileNet_V3_Small_Weights.IMAGENET1K_V1.transforms()
    got = classifier.preprocessing
    assert (got.resize, got.crop) == (preset.resize_size[0], (preset.crop_size[0],) * 2)
    assert (got.mean, got.std) == (tuple(preset.mean), tuple(preset.std))
    assert got.interpolation == preset.interpolation.value
    with torch.inference_mode():
        assert classifier.checked_logits(classifier.prepare(torch.rand(1, 3, 240, 300))).shape == (1, 1000)


@pytest.fixture
def hugging_face(tmp_path: Path):
    """A small ViT with random weights, its image processor, and a folder that holds both."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(4)
    config = transformers.ViTConfig(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
        image_size=32,
        patch_size=8,
        num_labels=5,
    )
    model = transformers.ViTForImageClassification(config).eval()
    with torch.no_grad():
        model.classifier.weight.mul_(50)  # untrained, it would hardly prefer any class
    processor = transformers.ViTImageProcessor(
        size={"height": 32, "width": 32}, image_mean=[0.4, 0.5, 0.6], image_std=[0.2, 0.3, 0.4], resample=3
    )
    model.save_pretrained(tmp_path)
    processor.save_pretrained(tmp_path)
    return model, processor, tmp_path


def test_transformers_object_and_folder_agree(hugging_face, coloured: Callable[..., tuple[Tensor, Tensor]]) -> None:
    model, processor, folder = hugging_face
    from_object, from_folder = TransformersClassifier(model, processor), load_classifier(f"transformers:{folder}")
    want = Preprocessing((32, 32), None, "bicubic", (0.4, 0.5, 0.6), (0.2, 0.3, 0.4))
    assert from_object.preprocessing == from_folder.preprocessing == want
    assert from_object.classes == from_folder.classes == 5
    images, _ = coloured(6, (40, 36), seed=5)
    with torch.inference_mode():
        inputs = want(images)
        plain = model(inputs).logits
        assert torch.equal(from_object.checked_logits(from_object.prepare(images)), plain)
        assert (from_folder.checked_logits(inputs.to(from_folder.device)).cpu() - plain).abs().max() < LOGIT_TOLERANCE
    labels = plain.argmax(dim=1)
    certificates = [DoubleMasking(c, THREAT, masks=2).certify(images, labels) for c in (from_object, from_folder)]
    assert [c.certified for c in certificates[0]] == [c.certified for c in certificates[1]]


def test_transformers_preprocessing_equals_the_image_processors_own(
    hugging_face, coloured: Callable[..., tuple[Tensor, Tensor]]
) -> None:
    model, processor, _ = hugging_face
    images, _ = coloured(2, (57, 91), seed=6)
    pixels = (images * 255).round().to(torch.uint8)
    own = processor(images=list(pixels), return_tensors="pt")["pixel_values"]
    ours = TransformersClassifier(model, processor).prepare(pixels / 255)
    # The processor rounds to 8 bits after resizing: half a step, over the smallest std of 0.2.
    assert (own - ours).abs().max() < 1.01 / 255 / 0.2


SHORTEST = {"size": {"shortest_edge": 256}, "crop_size": {"height": 224, "width": 192}, "do_center_crop": True}


@pytest.mark.parametrize(
    ("settings", "want"),
    [
        ({"size": {"height": 20, "width": 30}}, {"resize": (20, 30)}),
        (SHORTEST, {"resize": 256, "crop": (224, 192)}),
        ({**SHORTEST, "do_center_crop": False}, {"resize": 256, "crop": None}),
        ({**SHORTEST, "do_resize": False}, {"resize": None, "crop": (224, 192)}),
        ({}, {"resize": (64, 64), "mean": (0.5, 0.5, 0.5)}),
        ({"resample": 0}, {"interpolation": "nearest"}),
        ({"resample": 2}, {"interpolation": "bilinear"}),
        ({"resample": 3}, {"interpolation": "bicubic"}),
        ({"image_mean": [0.1, 0.2, 0.3], "image_std": [1, 2, 3]}, {"mean": (0.1, 0.2, 0.3), "std": (1, 2, 3)}),
        ({"do_normalize": False}, {"mean": None, "std": None}),
        ({"size": {"shortest_edge": 224}, "crop_pct": 0.875}, {"resize": 256, "crop": (224, 224)}),
        ({"size": {"shortest_edge": 384}, "crop_pct": 0.875}, {"resize": (384, 384), "crop": None}),
        ({**SHORTEST, "crop_pct": 0.8}, {"resize": 320, "crop": (224, 192)}),
    ],
)
def test_image_processor_settings_are_read(settings: dict, want: dict) -> None:
    got = processor_preprocessing(settings, SimpleNamespace(image_size=64, num_channels=3))
    assert {name: getattr(got, name) for name in want} == want


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"resample": 1}, "resampling filter 1 is not supported"),
        ({"size": {"longest_edge": 300}}, "resizing to {'longest_edge': 300} is not supported"),
        ({"size": {"shortest_edge": 200, "longest_edge": 300}}, "resizing to {.*} is not supported"),
        ({"do_rescale": False}, "multiplies 8-bit pixels by 1, not 1/255"),
        ({"rescale_factor": 1 / 127.5}, "multiplies 8-bit pixels by 0.00784314, not 1/255"),
    ],
    ids=str,
)
def test_settings_without_a_translation_are_refused(settings: dict, words: str) -> None:
    with pytest.raises(ClassifierError, match=f"{words}; pass preprocessing="):
        processor_preprocessing(settings, SimpleNamespace(image_size=64))


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("Bit", {"size": {"shortest_edge": 231}}),
        ("Bit", {"size": {"shortest_edge": 227}, "do_normalize": False}),
        ("ConvNext", {"size": {"shortest_edge": 221}}),
        ("ConvNext", {"size": {"shortest_edge": 400}}),
        ("PoolFormer", {}),
        ("DeiT", {}),
        ("ViT", {"image_mean": [0.4], "image_std": [0.2]}),
    ],
    ids=str,
)
def test_image_processors_are_matched_to_the_pixel(kind: str, settings: dict) -> None:
    transformers = pytest.importorskip("transformers")
    processor = getattr(transformers, f"{kind}ImageProcessor")(**settings)
    preprocessing = processor_preprocessing(processor.to_dict(), SimpleNamespace())
    random = torch.rand(1, 3, 9, 12, generator=torch.Generator().manual_seed(0))
    images = functional.interpolate(random[:, : preprocessing.channels], size=(250, 333), mode="bicubic").clamp(0, 1)
    pixels = (images * 255).round().to(torch.uint8)
    own, ours = processor(images=list(pixels), return_tensors="pt")["pixel_values"], preprocessing(pixels / 255)
    assert own.shape == ours.shape
    assert (own - ours).abs().mean() < 0.5 / 255 / min(preprocessing.std or (1.0,))


@pytest.mark.parametrize("kind", ["Levit", "MobileViT"])
def test_an_image_processor_that_does_more_than_it_says_is_refused(kind: str, hugging_face) -> None:
    transformers = pytest.importorskip("transformers")
    processor = getattr(transformers, f"{kind}ImageProcessor")(size={"shortest_edge": 256})
    with pytest.raises(ClassifierError, match=f"{kind}ImageProcessor does more than its settings say; pass prep"):
        TransformersClassifier(hugging_face[0], processor)


@pytest.fixture(scope="module")
def digits():
    """A logistic regression on scikit-learn's real 8×8 digits, and images that it was not fitted to."""
    datasets, linear_model = pytest.importorskip("sklearn.datasets"), pytest.importorskip("sklearn.linear_model")
    data = datasets.load_digits()
    images, labels = (data.images / 16).astype(np.float32)[:, None], data.target
    model = linear_model.LogisticRegression(max_iter=1000, C=1.0)
    model.fit(images[:1000].reshape(1000, -1), labels[:1000])
    classifier = CallableClassifier(
        lambda array: model.predict_proba(array.reshape(len(array), -1)),
        Preprocessing(fill=(0.0,)),
        outputs="probabilities",
    )
    return model, classifier, images[1000:1100], labels[1000:1100]


def test_a_scikit_learn_model_can_be_defended(digits) -> None:
    _, classifier, images, labels = digits
    defense = DoubleMasking(classifier, Threat.square(1), masks=4)
    verdicts, certificates = defense.predict(images), defense.certify(images, labels)
    right = np.array([v.label for v in verdicts]) == labels
    certified = np.array([c.certified for c in certificates])
    assert right.mean() > 0.7
    assert 0.05 < certified.mean() < right.mean()
    assert right[certified].all()


def double_masking_by_hand(predict: Callable[[np.ndarray], int], image: np.ndarray, keep: np.ndarray) -> int:
    """Algorithm 1 as the paper prints it, one image at a time; masked pixels are black."""
    labels = [predict(image * visible) for visible in keep]
    majority = max(sorted(set(labels), reverse=True), key=labels.count)
    for i, label in enumerate(labels):
        if label != majority and all(predict(image * keep[i] * visible) == label for visible in keep):
            return label
    return majority


def test_the_defended_digits_equal_masking_by_hand(digits) -> None:
    model, classifier, images, labels = digits
    threat = Threat.square(2)
    keep = MaskSet.build(threat, image=(8, 8), masks=3).visible()
    defense = DoubleMasking(classifier, threat, masks=3)
    verdicts, certificates = defense.predict(images), defense.certify(images, labels)
    assert {v.case for v in verdicts} == {*Case} - {Case.COARSE}  # every branch of the algorithm is compared

    def predict(image: np.ndarray) -> int:
        return int(model.predict(image.reshape(1, -1))[0])

    first_of_each = {v.case: n for n, v in reversed(list(enumerate(verdicts)))}
    for n in sorted({*range(4), *first_of_each.values()}):
        assert verdicts[n].label == double_masking_by_hand(predict, images[n], keep)
        every_pair = all(predict(images[n] * a * b) == labels[n] for a in keep for b in keep)
        assert certificates[n].certified == every_pair


@pytest.mark.parametrize("defense", [DoubleMasking, ChallengerMasking, MinorityReports])
def test_every_defense_takes_a_plain_module_function_or_string(defense: type, world: SimpleNamespace) -> None:
    spec = f"timm:test_resnet?num_classes=10&size=32&weights={world.folder / 'm.pth'}"
    inputs = world.preprocessing(world.images[:3]).clamp(-1, 1) / 2 + 0.5
    module = nn.Sequential(_Centre(), world.module).eval()
    answers = [
        [v.label for v in defense(model, Threat.square(4), masks=2).predict(inputs)]
        for model in (module, lambda a: module(torch.from_numpy(a)), spec)
    ]
    assert answers[0] == answers[1] == answers[2]


class _Centre(nn.Module):
    """Normalises inside the model, for users who hand over a module without preprocessing."""

    def forward(self, x: Tensor) -> Tensor:
        return x * 2 - 1


def test_onnx_with_half_precision_inputs_is_fed_half_floats(tmp_path: Path) -> None:
    path = tmp_path / "half.onnx"
    module = nn.Sequential(nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(48, 3)).eval().half()
    shapes = ({0: torch.export.Dim("batch")},)
    torch.onnx.export(module, (torch.rand(2, 3, 8, 8).half(),), path, dynamo=True, verbose=False, dynamic_shapes=shapes)
    classifier = OnnxClassifier(path)
    images = torch.rand(3, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        logits = classifier.checked_logits(images)
        assert logits.dtype == torch.float32
        assert (logits - module(images.half()).float()).abs().max() < 5e-3
