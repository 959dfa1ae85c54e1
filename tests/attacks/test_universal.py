"""A printed patch: found once, kept as a picture, stuck on anything."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from patchcleanser import Threat, TorchClassifier, Window
from patchcleanser.attacks.patch_attack import AttackSettings
from patchcleanser.attacks.universal import PrintedPatch, Printing, UniversalPatch, apply_patch
from patchcleanser.errors import DataError, InputError

DRAW = torch.Generator().manual_seed(5)
IMAGES = [0.4 + 0.05 * torch.rand(3, 12, 12, generator=DRAW) for _ in range(12)]
LABELS = [int(image.mean((1, 2)).argmax()) for image in IMAGES]


def test_one_patch_misleads_on_images_and_places_it_never_saw(colour: TorchClassifier) -> None:
    attack = UniversalPatch(colour, Threat.square(4), AttackSettings(iterations=40, target=2), batch=6)
    train = [i for i, label in enumerate(LABELS) if label != 2]
    half = len(train) // 2
    patch = attack.fit([IMAGES[i] for i in train[:half]], [LABELS[i] for i in train[:half]])
    assert patch.pixels.shape == (3, 4, 4)
    held_out = [IMAGES[i] for i in train[half:]]
    assert all(attack.fooled(patch, held_out, [LABELS[i] for i in train[half:]]))
    grey = PrintedPatch(torch.full((3, 4, 4), 0.42))
    assert not any(attack.fooled(grey, held_out, [LABELS[i] for i in train[half:]]))


def test_the_png_keeps_the_pixels_and_says_how_they_were_found(colour: TorchClassifier, tmp_path: Path) -> None:
    attack = UniversalPatch(
        colour, Threat.square(4), AttackSettings(iterations=2, seed=9), printing=Printing(rotation=5)
    )
    patch = attack.fit(IMAGES[:3], LABELS[:3])
    patch.save(tmp_path / "patch.png")
    again = PrintedPatch.load(tmp_path / "patch.png")
    torch.testing.assert_close(again.pixels, patch.pixels, atol=0.5 / 255 + 1e-6, rtol=0)
    assert again.about["settings"]["seed"] == 9
    assert again.about["printing"]["rotation"] == 5
    assert Threat.from_dict(again.about["threat"]) == Threat.square(4)
    assert again.about["classifier"] == colour.fingerprint
    stuck = apply_patch(IMAGES[0], again.pixels, Window(2, 3, 4, 4))
    torch.testing.assert_close(stuck[:, 2:6, 3:7], again.pixels, atol=1e-5, rtol=0)


@pytest.mark.parametrize("rotation", [0.0, 17.0, 45.0, 90.0])
@pytest.mark.parametrize("shape", [(4, 4), (3, 6)])
def test_a_turned_patch_never_leaves_its_window(rotation: float, shape: tuple[int, int]) -> None:
    black, white = torch.zeros(3, 20, 20), torch.ones(3, 8, 8)
    window = Window(5, 6, *shape)
    stuck = apply_patch(black, white, window, rotation=rotation, scale=0.9)
    assert stuck.sum() > 0
    stuck[:, 5 : window.bottom, 6 : window.right] = 0
    assert stuck.sum() == 0


def test_gradients_reach_the_patch() -> None:
    patch = torch.full((3, 4, 4), 0.5, requires_grad=True)
    apply_patch(IMAGES[0], patch, Window(0, 0, 6, 6), rotation=10, brightness=0.9).sum().backward()
    assert patch.grad is not None
    assert (patch.grad > 0).all()


def test_impossible_prints_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="lies outside an image of 12×12 px"):
        apply_patch(IMAGES[0], torch.ones(3, 4, 4), Window(10, 0, 4, 4))
    with pytest.raises(InputError, match="a scale lies in"):
        apply_patch(IMAGES[0], torch.ones(3, 4, 4), Window(0, 0, 4, 4), scale=2)
    (tmp_path / "no.png").write_bytes(b"no picture")
    with pytest.raises(DataError, match="cannot read the patch"):
        PrintedPatch.load(tmp_path / "no.png")
