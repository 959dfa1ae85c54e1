"""Networks that pool what is visible: an answer that no hidden pixel can change, even where nothing fills it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from patchcleanser import TorchClassifier, load_classifier
from patchcleanser.classifiers.trained import bare_spec
from patchcleanser.errors import InputError
from patchcleanser.networks.visible_pooling import visible_only
from patchcleanser.training.artifacts import write_model

SPEC = "visible:net:bagnet?width=16&depth=3&field=7"


def visible() -> TorchClassifier:
    torch.manual_seed(0)
    classifier = load_classifier(SPEC, device="cpu")
    assert isinstance(classifier, TorchClassifier)
    return classifier


def masked(images: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
    return torch.cat([images, hidden.expand(len(images), 1, 32, 32)], dim=1)


def test_hidden_pixels_change_nothing_whatever_colour_they_have() -> None:
    classifier, hidden = visible(), torch.zeros(1, 32, 32)
    hidden[:, 4:14, 20:29] = 1
    images = torch.rand(3, 3, 32, 32)
    other = torch.where(hidden > 0, torch.randn(3, 3, 32, 32) * 100, images)
    with torch.inference_mode():
        assert torch.allclose(*(classifier.logits(masked(x, hidden)) for x in (images, other)), atol=1e-5)
        moved = torch.where(hidden > 0, images, 1 - images)
        assert not torch.allclose(*(classifier.logits(masked(x, hidden)) for x in (images, moved)), atol=1e-4)


def test_the_answer_is_the_mean_of_the_scores_that_see_no_hidden_pixel() -> None:
    classifier, hidden = visible(), torch.zeros(1, 32, 32)
    hidden[:, 10, 10] = 1
    images = torch.rand(2, 3, 32, 32)
    with torch.inference_mode():
        local = classifier.module.local(images)
        seen = [local[:, :, i, j] for i in range(26) for j in range(26) if not (4 <= i <= 10 and 4 <= j <= 10)]
        assert torch.allclose(classifier.logits(masked(images, hidden)), torch.stack(seen).mean(0), atol=1e-5)
        none = classifier.logits(masked(images, torch.ones(1, 32, 32)))
        assert torch.equal(none, torch.zeros_like(none))


def test_without_masks_it_is_the_network_that_it_wraps() -> None:
    torch.manual_seed(0)
    plain, images = load_classifier(SPEC.removeprefix("visible:"), device="cpu"), torch.rand(2, 3, 32, 32)
    with torch.inference_mode():
        assert torch.allclose(visible().logits(masked(images, torch.zeros(1, 32, 32))), plain.logits(images), atol=1e-5)


@pytest.mark.parametrize("spec", ["zoo:tiny", "net:bagnet?votes=true", SPEC])
def test_a_network_that_does_not_pool_local_logits_by_their_mean_is_refused(spec: str) -> None:
    with pytest.raises(
        InputError,
        match="pools local logits by their mean, such as net:bagnet, or one with a head",
    ):
        load_classifier(f"visible:{spec}", device="cpu")


def test_one_that_was_trained_is_loaded_with_its_card(tmp_path: Path) -> None:
    classifier = visible()
    assert bare_spec(SPEC) == SPEC
    write_model(classifier.module, tmp_path, {"model": SPEC, "preprocessing": vars(classifier.preprocessing)})
    again = load_classifier(f"trained:{tmp_path}", device="cpu")
    assert again.mask_aware
    inputs = masked(torch.rand(2, 3, 32, 32), torch.zeros(1, 32, 32))
    with torch.inference_mode():
        assert torch.allclose(again.logits(inputs), classifier.logits(inputs), atol=1e-2)


@pytest.mark.parametrize("value", [-1.0, 0.0, float("nan"), float("inf"), -float("inf")])
def test_hidden_features_leave_not_even_the_sign_of_a_zero(value: float) -> None:
    features = torch.ones(1, 2, 3, 3)
    features[..., 1, 1] = value
    visible = torch.ones(1, 3, 3, dtype=torch.bool)
    visible[..., 1, 1] = False
    inputs = visible_only(features, visible)
    assert inputs[0, :, 1, 1].view(torch.int32).tolist() == torch.tensor([0.0, 0.0, 1.0]).view(torch.int32).tolist()
