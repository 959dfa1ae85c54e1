"""Attacks that hide objects, on a detector that any colour blinds."""

import numpy as np
import torch
from torch import Tensor, nn

from patchcleanser.attacks.hide_objects import attack_objects, hidden_object
from patchcleanser.core.detections import Detections
from patchcleanser.core.geometry import Window
from patchcleanser.data.dataset import ArrayDataset
from patchcleanser.data.object_sets import ObjectDataset
from patchcleanser.defenses.object_seeker import ObjectSeeker
from patchcleanser.detectors.torchvision_detectors import ModuleDetector

CLASSES = ("background", "thing")
BOX = [2.0, 2.0, 8.0, 8.0]


class Colourblind(nn.Module):
    """Shows one object if the middle of its box is bright and the picture has no colour."""

    def forward(self, images: list[Tensor]) -> list[dict[str, Tensor]]:
        number = int(images[0][:, 4:6, 4:6].min() > 0.9 and (images[0][0] - images[0][1]).abs().max() < 0.3)
        labels = torch.ones(number, dtype=torch.int64)
        return [{"boxes": torch.tensor([BOX])[:number], "labels": labels, "scores": torch.full((number,), 0.9)}]


def defense() -> ObjectSeeker:
    return ObjectSeeker(ModuleDetector(Colourblind().eval(), CLASSES), "3", stride=2)


def dataset() -> ObjectDataset:
    pixels = np.full((2, 24, 24, 3), 255, dtype=np.uint8)
    pixels[1, 4, 4] = 0  # this object is not shown, so it is not certified
    arrays = ArrayDataset("white", pixels, np.zeros(2, dtype=np.int64), ("any",))
    return ObjectDataset(arrays, [Detections([BOX], [1], [1.0])] * 2, CLASSES)


def test_an_attack_hides_objects_from_the_detector_and_never_from_its_certificate() -> None:
    results = list(attack_objects(defense(), dataset(), iterations=5))
    assert {result.place for result in results} == {"near", "far"}  # of the first image
    assert {result.image for result in results} == {"0"}
    assert all(result.undefended == 0 for result in results)
    assert not any(result.broken for result in results)
    assert min(result.defended for result in results) >= 0.79


def test_the_same_seed_gives_the_same_patch_and_only_the_patch_changes() -> None:
    image, target, patch = torch.full((3, 24, 24), 0.95), Detections([BOX], [1], [1.0]), Window(15, 12, 3, 3)
    first, second = (hidden_object(defense(), image, target, patch, iterations=4, seed=(3,)) for _ in range(2))
    assert torch.equal(first, second)
    first[(..., *patch.slices)] = 0.95
    assert torch.equal(first, image)
