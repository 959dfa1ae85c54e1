"""Hidden pixels filled in from visible ones: mask-aware, and still a function of what is visible."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from patchcleanser import DoubleMasking, Threat, TorchClassifier, load_classifier, load_dataset
from patchcleanser.classifiers.preprocessing import Preprocessing
from patchcleanser.classifiers.wrappers import inpainting
from patchcleanser.core.masks import MaskSet
from patchcleanser.errors import InputError
from patchcleanser.networks.flip_ensemble import Mirrored
from patchcleanser.networks.inpainting import Inpainting, inpaint


def random_windows(number: int, side: int, draw: np.random.Generator) -> Tensor:
    """Two random rectangles hidden in each image, bool [number, 1, side, side]."""
    hidden = torch.zeros(number, 1, side, side, dtype=torch.bool)
    for image in hidden:
        for _ in range(2):
            top, left = draw.integers(0, side - 1, 2)
            high, wide = draw.integers(1, side, 2)
            image[:, top : top + high, left : left + wide] = True
    return hidden


@pytest.mark.parametrize("side", [1, 7, 32])
def test_what_lies_under_the_mask_does_not_matter(side: int) -> None:
    """The condition under which the theorem holds for a mask-aware classifier (SPEC, trap 3)."""
    images = torch.rand(64, 3, side, side, generator=torch.Generator().manual_seed(0))
    hidden = random_windows(64, side, np.random.default_rng(0)) if side > 1 else torch.ones(64, 1, 1, 1) > 0
    visible = (~hidden).float()
    attacked = torch.where(hidden, 1000 * torch.rand_like(images), images)
    assert torch.equal(inpaint(images, visible), inpaint(attacked, visible))


def test_visible_pixels_stay_as_they_are() -> None:
    images = torch.rand(64, 3, 20, 33, generator=torch.Generator().manual_seed(0))
    hidden = random_windows(64, 33, np.random.default_rng(1))[..., :20, :]
    filled = inpaint(images, (~hidden).float())
    assert torch.equal(filled[~hidden.expand_as(images)], images[~hidden.expand_as(images)])
    assert torch.equal(inpaint(images, torch.ones_like(hidden).float()), images)


def test_a_picture_of_one_colour_is_restored_and_one_hidden_whole_becomes_the_mean_colour() -> None:
    images = torch.full((32, 3, 32, 32), 0.7)
    hidden = random_windows(32, 32, np.random.default_rng(2))
    hidden[:, :, 0, 0] = False
    assert torch.allclose(inpaint(images, (~hidden).float()), images, atol=1e-5)
    assert (inpaint(images, torch.zeros(32, 1, 32, 32)) == 0).all()


def test_what_is_filled_in_lies_between_the_colours_around_it() -> None:
    ramp = torch.linspace(0, 1, 32).expand(1, 3, 32, 32)
    hidden = torch.zeros(1, 1, 32, 32, dtype=torch.bool)
    hidden[..., 8:24, 8:24] = True
    filled = inpaint(ramp, (~hidden).float())
    assert (filled - ramp).abs().mean() < (ramp * ~hidden - ramp).abs().mean() / 4
    assert filled.min() >= 0
    assert filled.max() <= 1


def test_where_nothing_is_hidden_it_is_the_network_itself() -> None:
    plain, filling = (load_classifier(spec, device="cpu") for spec in ("zoo:tiny", "inpaint:zoo:tiny"))
    images = torch.stack([load_dataset("sample").image(i) for i in range(8)])
    inputs = plain.prepare(images)
    with torch.inference_mode():
        with_channel = torch.cat([inputs, torch.zeros_like(inputs[:, :1])], dim=1)
        assert torch.equal(filling.logits(with_channel), plain.logits(inputs))
    assert filling.names == plain.names
    assert filling.fingerprint != plain.fingerprint


@pytest.mark.parametrize("precision", ["exact", "fast"])
def test_labels_under_masks_are_those_of_the_filled_in_picture(precision: str) -> None:
    classifier = load_classifier("inpaint:zoo:tiny", device="cpu")
    plain = load_classifier("zoo:tiny", device="cpu")
    images = torch.stack([load_dataset("sample").image(i) for i in range(12)])
    defense = DoubleMasking(classifier, Threat.square(5), masks=3, precision=precision)  # type: ignore[arg-type]
    results = defense.examine(images, [0] * 12, maps=True)
    masks = MaskSet.build(Threat.square(5), image=(32, 32), masks=3)
    visible = torch.from_numpy(masks.visible()).float()[:, None]
    with torch.inference_mode():
        for image, result in zip(images, results, strict=True):
            inputs = plain.prepare(image[None]).expand(9, -1, -1, -1)
            logits = plain.logits(inpaint(inputs, visible))
            two = logits.topk(2).values
            clear = (two[:, 0] - two[:, 1] > 1e-3).numpy()
            index = np.diag(result.table.mask_set.unions.index)
            assert (result.table.labels[index] == logits.argmax(1).numpy())[clear].all()
            assert clear.any()


@pytest.mark.parametrize("around", [(Inpainting,), (Mirrored,), (Inpainting, Mirrored)])
def test_no_patch_fools_a_certified_image(around: tuple[type[Inpainting | Mirrored], ...]) -> None:
    """Every position, many contents, on a network that answers to single pixels."""
    torch.manual_seed(0)
    network: nn.Module = nn.Sequential(nn.Flatten(), nn.Linear(3 * 36, 16), nn.ReLU(), nn.Linear(16, 3)).eval()
    for wrapper in around:
        network = wrapper(network).eval()
    classifier = TorchClassifier(network, Preprocessing(), classes=3)
    defense = DoubleMasking(classifier, Threat.square(1), masks=3)
    images = torch.rand(120, 3, 6, 6, generator=torch.Generator().manual_seed(1))
    labels = [verdict.label for verdict in defense.predict(images)]
    certified = [i for i, c in enumerate(defense.certify(images, labels)) if c.certified]
    assert 5 < len(certified) < 120
    draw = torch.Generator().manual_seed(2)
    for i in certified[:12]:
        places = [(top, left) for top in range(6) for left in range(6)]
        attacked = images[i].repeat(3 * len(places), 1, 1, 1)
        for k, (top, left) in enumerate(places * 3):
            attacked[k, :, top, left] = (torch.rand(3, generator=draw) * 2).round().clamp(0, 1)
        assert {verdict.label for verdict in defense.predict(attacked)} == {labels[i]}


def test_images_that_are_resized_need_a_threat_on_the_input_grid() -> None:
    classifier = load_classifier("inpaint:zoo:tiny", device="cpu")
    with pytest.raises(InputError, match="use a threat on the input grid"):
        DoubleMasking(classifier, Threat.square(5), masks=3).predict(torch.rand(1, 3, 40, 40))
    DoubleMasking(classifier, Threat.square(5, grid="input"), masks=3).predict(torch.rand(1, 3, 40, 40))


def test_a_network_that_is_told_already_is_refused() -> None:
    classifier = load_classifier("inpaint:zoo:tiny", device="cpu")
    assert isinstance(classifier, TorchClassifier)
    with pytest.raises(InputError, match="plain torch networks only"):
        inpainting(classifier)


def test_a_classifier_whose_answers_are_not_only_its_networks_is_refused() -> None:
    class Doubled(TorchClassifier):
        def logits(self, inputs: torch.Tensor) -> torch.Tensor:
            return 2 * super().logits(inputs)

    with pytest.raises(InputError, match="plain torch networks only"):
        inpainting(Doubled(torch.nn.Flatten().eval()))


def test_one_that_was_trained_is_found_again_without_the_folder_it_began_with(tmp_path: Path) -> None:
    from patchcleanser.classifiers.trained import bare_spec
    from patchcleanser.training.artifacts import write_model

    classifier = load_classifier("inpaint:zoo:tiny", device="cpu")
    assert isinstance(classifier, TorchClassifier)
    assert bare_spec("inpaint:zoo:tiny") == "inpaint:net:tiny"
    card = {"model": bare_spec("inpaint:zoo:tiny"), "preprocessing": vars(classifier.preprocessing)}
    write_model(classifier.module, tmp_path, card)
    again = load_classifier(f"trained:{tmp_path}", device="cpu")
    assert again.mask_aware
    images = torch.rand(2, 4, 32, 32).round()
    with torch.inference_mode():
        assert torch.allclose(again.logits(images), classifier.logits(images), atol=1e-2)
