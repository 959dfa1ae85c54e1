"""The mean of several networks' answers: still a function of what is visible."""

from __future__ import annotations

import re

import pytest
import torch

from patchcleanser import CallableClassifier, DoubleMasking, Threat, TorchClassifier, load_classifier, load_dataset
from patchcleanser.classifiers.wrappers import mean_of
from patchcleanser.engine.fast.onnxruntime import OnnxRuntimeBackend
from patchcleanser.errors import InputError, PatchCleanserError, TrainModeError
from patchcleanser.networks.builders import build_network

BOTH = "mean:zoo:tiny,net:resnet?wider=0.25"


@pytest.fixture
def images() -> torch.Tensor:
    return torch.stack([load_dataset("sample").image(i) for i in range(6)])


def test_it_answers_by_the_mean_of_all_and_each_reads_its_own_options(images: torch.Tensor) -> None:
    torch.manual_seed(0)  # of the untrained one
    both = load_classifier(BOTH, device="cpu")
    assert isinstance(both, TorchClassifier)
    first, second = both.module.networks  # type: ignore[union-attr,misc]
    inputs = both.prepare(images)
    with torch.inference_mode():
        assert torch.allclose(both.logits(inputs), (first(inputs) + second(inputs)) / 2, atol=1e-4)
        assert not torch.allclose(both.logits(inputs), first(inputs), atol=1e-2)
    assert second.conv1.out_channels == 24
    assert both.names == load_classifier("zoo:tiny", device="cpu").names
    turned = load_classifier("mirror:mean:zoo:tiny,zoo:tiny", device="cpu")
    with torch.inference_mode():
        wanted = load_classifier("mirror:zoo:tiny", device="cpu").logits(inputs)
        assert torch.allclose(turned.logits(inputs), wanted, atol=1e-4)


def test_what_it_is_depends_on_every_member() -> None:
    torch.manual_seed(0)
    first, again = load_classifier(BOTH, device="cpu"), load_classifier("mean:zoo:tiny,zoo:tiny", device="cpu")
    alone = load_classifier("zoo:tiny", device="cpu")
    assert len({first.fingerprint, again.fingerprint, alone.fingerprint}) == 3


@pytest.mark.parametrize("precision", ["exact", "fast"])
@pytest.mark.parametrize("wrapper", ["", "inpaint:"])
def test_labels_under_masks_are_those_of_the_masked_images(images: torch.Tensor, precision: str, wrapper: str) -> None:
    """Twice the same network answers as the network does, and so all labels are its labels."""
    alone, twice = (f"{wrapper}zoo:tiny", f"mean:{wrapper}zoo:tiny,{wrapper}zoo:tiny")
    results = []
    for spec in (alone, twice):
        classifier = load_classifier(spec, device="cpu")
        defense = DoubleMasking(classifier, Threat.square(5), masks=3, precision=precision)  # type: ignore[arg-type]
        results.append([result.table.labels.tolist() for result in defense.examine(images, [0] * 6, maps=True)])
    assert results[0] == results[1]
    assert len({label for labels in results[0] for label in labels}) > 2


def test_it_can_be_exported_for_batches_of_any_size(images: torch.Tensor) -> None:
    classifier = load_classifier(BOTH, device="cpu")
    assert isinstance(classifier, TorchClassifier)
    exported = OnnxRuntimeBackend(classifier)
    inputs = classifier.prepare(images)
    with torch.inference_mode():
        for number in (2, 1, 6):
            assert torch.allclose(exported.logits(inputs[:number]), classifier.logits(inputs[:number]), atol=1e-3)


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("mean:zoo:tiny", "two classifiers or more, got 1"),
        ("mean:zoo:tiny,net:resnet?classes=4", "with the same number of classes, got 10 and 4"),
        ("mean:zoo:tiny,inpaint:zoo:tiny", "with the same mask_aware, got False and True"),
        ("mean:zoo:tiny,timm:test_resnet?weights=none&num_classes=10", "with the same preprocessing"),
        ("mean:zoo:tiny,tokens:zoo:cifar10-vit", "plain torch networks only"),
        ("mean:zoo:tiny,", "cannot read classifier ''"),
        ("mean:mean:zoo:tiny,zoo:tiny", "two classifiers or more, got 1"),
    ],
)
def test_what_cannot_be_averaged_is_refused(spec: str, words: str) -> None:
    with pytest.raises(PatchCleanserError, match=re.escape(words)):
        load_classifier(spec, device="cpu")


def test_a_member_in_train_mode_is_refused_not_changed() -> None:
    tiny = load_classifier("zoo:tiny", device="cpu")
    assert isinstance(tiny, TorchClassifier)
    tiny.module.train()
    with pytest.raises(TrainModeError, match="in train mode"):
        mean_of([tiny, load_classifier("zoo:tiny", device="cpu")])
    assert tiny.module.training


def test_one_that_prepares_images_itself_or_is_told_what_is_hidden_by_itself_is_refused() -> None:
    class Own(TorchClassifier):
        def prepare(self, images: torch.Tensor) -> torch.Tensor:
            return super().prepare(1 - images)

    class Told(TorchClassifier):
        mask_aware = True

    tiny = load_classifier("zoo:tiny", device="cpu")
    assert isinstance(tiny, TorchClassifier)
    for kind, words in (
        (Own, "plain torch networks only"),
        (Told, "own attribute says that they are mask_aware"),
    ):
        with pytest.raises(InputError, match=words):
            mean_of([tiny, kind(tiny.module, tiny.preprocessing, classes=10)])


def test_classes_of_other_names_and_functions_are_refused() -> None:
    tiny, second = (load_classifier("zoo:tiny", device="cpu") for _ in range(2))
    second.names = tuple(reversed(second.names or ()))
    with pytest.raises(InputError, match="of the same classes, got airplane, … and truck, …"):
        mean_of([load_classifier("net:tiny", device="cpu"), tiny, second])  # of the first nobody knows the names
    half = TorchClassifier(build_network("tiny", {}).eval().half(), tiny.preprocessing, classes=10)
    with pytest.raises(InputError, match=r"the same precision, got torch\.float32 and torch\.float16"):
        mean_of([tiny, half])
    with pytest.raises(InputError, match="plain torch networks only"):
        mean_of([tiny, CallableClassifier(lambda images: images.mean((2, 3)), classes=3)])
