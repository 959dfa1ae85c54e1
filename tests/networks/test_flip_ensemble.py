"""The mean of the answers to an image and its mirror image: still a function of what is visible."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from patchcleanser import CallableClassifier, DoubleMasking, Threat, TorchClassifier, load_classifier, load_dataset
from patchcleanser.classifiers.trained import bare_spec
from patchcleanser.classifiers.wrappers import mirrored
from patchcleanser.engine.fast.onnxruntime import OnnxRuntimeBackend
from patchcleanser.errors import InputError
from patchcleanser.training.artifacts import write_model


def sample(number: int) -> Tensor:
    return torch.stack([load_dataset("sample").image(i) for i in range(number)])


def test_it_answers_alike_to_an_image_and_its_mirror_image_by_the_mean_of_both() -> None:
    plain, both = (load_classifier(spec, device="cpu") for spec in ("zoo:tiny", "mirror:zoo:tiny"))
    inputs = plain.prepare(sample(8))
    with torch.inference_mode():
        mean = (plain.logits(inputs) + plain.logits(inputs.flip(-1))) / 2
        assert torch.allclose(both.logits(inputs), mean, atol=1e-4)
        assert torch.allclose(both.logits(inputs.flip(-1)), mean, atol=1e-4)
        assert not torch.allclose(plain.logits(inputs), mean, atol=1e-2)
    assert both.names == plain.names
    assert both.fingerprint != plain.fingerprint


@pytest.mark.parametrize("precision", ["exact", "fast"])
@pytest.mark.parametrize("spec", ["mirror:zoo:tiny", "mirror:inpaint:zoo:tiny"])
def test_labels_under_masks_are_those_of_the_masked_image_and_its_mirror_image(spec: str, precision: str) -> None:
    """A mirrored image must not be masked where the image itself would be: the same pixels are hidden."""
    once = load_classifier(spec.removeprefix("mirror:"), device="cpu")
    images = sample(10)
    (own,) = {load_classifier(spec, device="cpu").mask_aware}
    assert own == once.mask_aware
    defense = DoubleMasking(load_classifier(spec, device="cpu"), Threat.square(5), masks=3, precision=precision)  # type: ignore[arg-type]
    results = defense.examine(images, [0] * 10, maps=True)
    hidden = torch.from_numpy(~results[0].table.mask_set.visible())[:, None]
    checked = 0
    with torch.inference_mode():
        for image, result in zip(images, results, strict=True):
            inputs = once.prepare(image[None]).expand(9, -1, -1, -1).masked_fill(hidden, 0.0)
            if once.mask_aware:
                inputs = torch.cat([inputs, hidden.float()], dim=1)
            logits = once.logits(inputs) + once.logits(inputs.flip(-1))
            two = logits.topk(2).values
            clear = two[:, 0] - two[:, 1] > 1e-2
            index = result.table.mask_set.unions.index.diagonal()
            assert (torch.from_numpy(result.table.labels[index]) == logits.argmax(1))[clear].all()
            checked += int(clear.sum())
    assert checked > 60


@pytest.mark.parametrize("spec", ["mirror:zoo:tiny", "mirror:inpaint:zoo:tiny"])
def test_it_can_be_exported_for_batches_of_any_size(spec: str) -> None:
    """A CPU without bfloat16 goes by ONNX Runtime."""
    classifier = load_classifier(spec, device="cpu")
    assert isinstance(classifier, TorchClassifier)
    exported = OnnxRuntimeBackend(classifier)
    inputs = classifier.prepare(sample(7))
    if classifier.mask_aware:
        inputs = torch.cat([inputs, torch.zeros_like(inputs[:, :1])], dim=1)
    with torch.inference_mode():
        for number in (2, 1, 7):
            results = exported.logits(inputs[:number])
            assert torch.allclose(results, classifier.logits(inputs[:number]), atol=1e-3)


@pytest.mark.parametrize("other", ["tokens:zoo:cifar10-vit", "function"])
def test_a_classifier_whose_answers_are_not_only_its_networks_is_refused(other: str) -> None:
    if other == "function":
        classifier = CallableClassifier(lambda images: images.mean((2, 3)), classes=3)
    else:
        classifier = load_classifier(other, device="cpu")  # type: ignore[assignment]
    with pytest.raises(InputError, match="plain torch networks only"):
        mirrored(classifier)  # type: ignore[arg-type]


def test_one_that_was_trained_is_found_again_without_the_folder_it_began_with(tmp_path: Path) -> None:
    classifier = load_classifier("mirror:inpaint:zoo:tiny", device="cpu")
    assert isinstance(classifier, TorchClassifier)
    assert bare_spec("mirror:inpaint:zoo:tiny") == "mirror:inpaint:net:tiny"
    write_model(
        classifier.module,
        tmp_path,
        {"model": bare_spec("mirror:inpaint:zoo:tiny"), "preprocessing": vars(classifier.preprocessing)},
    )
    again = load_classifier(f"trained:{tmp_path}", device="cpu")
    assert again.mask_aware
    images = torch.rand(2, 4, 32, 32).round()
    with torch.inference_mode():
        assert torch.allclose(again.logits(images), classifier.logits(images), atol=1e-2)
