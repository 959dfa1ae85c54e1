"""A ViT that drops hidden tokens: mask-aware, and still a function of what is visible."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from patchcleanser import DoubleMasking, Threat, TorchClassifier, load_classifier, load_dataset
from patchcleanser.classifiers.wrappers import TokenDroppingClassifier
from patchcleanser.core.label_table import LabelTable
from patchcleanser.core.masks import MaskSet
from patchcleanser.engine.exact import ExactEngine
from patchcleanser.engine.masking import ImageState, LabelRequest
from patchcleanser.errors import InputError
from patchcleanser.networks.token_dropping import visible_tokens

VIT = "timm:vit_tiny_patch16_224?img_size=32&patch_size=4&num_classes=5&weights=none&depth=2&size=32"


def dropping() -> TokenDroppingClassifier:
    torch.manual_seed(0)
    classifier = load_classifier(f"tokens:{VIT}", device="cpu")
    assert isinstance(classifier, TokenDroppingClassifier)
    return classifier


def with_mask(images: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
    return torch.cat([images, hidden.expand(len(images), 1, 32, 32).float()], dim=1)


def test_what_lies_under_the_mask_does_not_matter() -> None:
    """The condition under which the theorem holds for a mask-aware classifier (SPEC, trap 3)."""
    classifier, draw = dropping(), torch.Generator().manual_seed(1)
    image = torch.rand(1, 3, 32, 32, generator=draw)
    masks = MaskSet.build(Threat.square(5), image=(32, 32), masks=3)
    unions = masks.unions.masks[:20]
    with torch.inference_mode():
        for union in unions:
            table = LabelTable(masks)
            at = torch.tensor([masks.unions.masks.index(union)]).numpy()
            answers = []
            for _ in range(2):
                attacked = image.clone()
                for w in union:
                    patch = torch.rand(3, w.height, w.width, generator=draw)
                    attacked[0, :, w.top : w.bottom, w.left : w.right] = patch
                table = LabelTable(masks)
                ExactEngine(classifier, grid="source").compute([LabelRequest(ImageState(attacked[0], table), at)])
                answers.append((int(table.labels[at[0]]), float(table.margins[at[0]])))
            assert answers[0] == answers[1]


def test_without_masks_it_is_the_plain_vit() -> None:
    classifier = dropping()
    images = torch.rand(3, 3, 32, 32)
    with torch.inference_mode():
        plain = classifier.module(images)
        assert torch.allclose(classifier.logits(with_mask(images, torch.zeros(1, 1, 32, 32))), plain, atol=1e-5)


def test_hidden_tokens_are_left_out_and_the_answer_changes() -> None:
    classifier = dropping()
    hidden = torch.zeros(1, 1, 32, 32)
    hidden[..., :8, :8] = 1
    images = torch.rand(2, 3, 32, 32).masked_fill(hidden.bool(), 0.0)
    with torch.inference_mode():
        dropped = classifier.logits(with_mask(images, hidden))
        assert not torch.allclose(dropped, classifier.module(images), atol=1e-4)
        assert visible_tokens(hidden[:, 0] > 0, 64).sum() == 60
        # A token with one visible pixel stays, and with every pixel hidden all tokens do.
        hidden[..., 0, 0] = 0
        assert visible_tokens(hidden[:, 0] > 0, 64).sum() == 61
        assert visible_tokens(torch.ones(1, 32, 32) > 0, 64).all()


def test_it_has_a_fingerprint_of_its_own() -> None:
    classifier = dropping()
    assert classifier.fingerprint != TorchClassifier(classifier.module, classifier.preprocessing).fingerprint


def test_it_predicts_and_certifies_real_images() -> None:
    sample = load_dataset("sample")
    assert sample.labels is not None
    defense = DoubleMasking(load_classifier("tokens:zoo:cifar10-vit", device="cpu"), Threat.square(5), masks=2)
    images = [sample.image(i) for i in range(8)]
    right = sum(v.label == y for v, y in zip(defense.predict(images), sample.labels[:8], strict=True))
    assert right >= 6
    assert len(defense.certify(images, sample.labels[:8])) == 8


def test_images_that_are_resized_need_the_input_grid() -> None:
    with pytest.raises(InputError, match="use a threat on the input grid"):
        DoubleMasking(dropping(), Threat.square(5), masks=2).predict(torch.rand(1, 3, 40, 40))
    DoubleMasking(dropping(), Threat.square(5, grid="input"), masks=2).predict(torch.rand(1, 3, 40, 40))


def test_other_networks_are_refused() -> None:
    with pytest.raises(InputError, match="timm's VisionTransformer only, got ResNet"):
        load_classifier("tokens:zoo:tiny", device="cpu")


def test_it_cannot_be_trained_as_something_it_would_not_be_afterwards(tmp_path: Path) -> None:
    from patchcleanser.cli.train import load_trainable

    with pytest.raises(InputError, match="it would learn and be kept as the plain network"):
        load_trainable(f"tokens:{VIT}", "cpu", tmp_path / "out")
