"""Fast labels certify nothing that exact labels refute, however rare and steep the difference is."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from patchcleanser import (
    DoubleMasking,
    Job,
    Threat,
    TorchClassifier,
    evaluate,
    load_classifier,
    load_dataset,
)
from patchcleanser.core.results import Certificate
from patchcleanser.data import chosen
from patchcleanser.engine.fast.backends import half_type
from soundness.constructed import MASKS, OWN, SIDE, THREAT, Pixel, company, painted

IMAGES = 40
SEEN = 191 / 255
"""Below 3/4, and rounded to 3/4 in bfloat16."""

needs_half = pytest.mark.skipif(half_type(torch.device("cpu")) is None, reason="this CPU has no bfloat16 instructions")


def steep(gate: tuple[Pixel, Pixel], step: Pixel) -> nn.Module:
    """Class 0 everywhere, but where both pixels of the gate are masked and the third is darker than 3/4 class 1.

    All weights are whole powers of two or small multiples of them, so that bfloat16 holds them exactly.
    """
    body, head = nn.Linear(SIDE**2, 2), nn.Linear(2, 3)
    with torch.no_grad():
        for layer in (body, head):
            layer.weight.zero_()
            layer.bias.zero_()
        body.bias[0] = 1.0
        body.weight[1, step[0] * SIDE + step[1]] = -(2.0**16)
        for row, column in gate:
            body.weight[1, row * SIDE + column] = -(2.0**16)
        body.bias[1] = 7 * 2.0**14  # 3/4 of the step and two halves of the gate
        head.weight[0, 0], head.weight[1, 1] = 16.0, 1.0
    return nn.Sequential(nn.Flatten(), body, nn.ReLU(), head).eval()


def steep_case(seed: int) -> tuple[nn.Module, Tensor]:
    """Such a network at places drawn by a seed, and the image that exact labels refute."""
    places = torch.randperm(9, generator=torch.Generator().manual_seed(seed))[:3].tolist()
    first, second, third = ((OWN[place // 3], OWN[place % 3]) for place in places)
    return steep((first, second), third), painted(torch.ones(1, SIDE, SIDE), third, SEEN)


def certificates(network: nn.Module, images: Tensor, **options: str) -> list[Certificate]:
    """Of images of class 0."""
    defense = DoubleMasking(TorchClassifier(network), THREAT, masks=MASKS, **options)  # type: ignore[arg-type]
    return defense.certify(images, [0] * len(images))


@needs_half
@pytest.mark.parametrize("seed", range(3))
def test_a_steep_step_under_one_union_of_one_image_gives_no_confirmed_certificate(seed: int) -> None:
    network, image = steep_case(seed)
    images = company(IMAGES)
    images[seed] = image
    exact, fast, confirmed = (
        certificates(network, images, **options)
        for options in ({}, {"precision": "fast"}, {"precision": "fast", "confirm": "all"})
    )
    assert not exact[seed].certified
    assert [c.certified for c in confirmed] == [c.certified for c in exact]
    assert all(c.unconfirmed == 0 for c in (*exact, *confirmed) if c.certified)
    # Without being confirmed it may be wrong, and says that it is statistical.
    assert not fast[seed].certified or fast[seed].unconfirmed > 0


def test_which_labels_are_audited_cannot_be_known_beforehand(tmp_path: Path) -> None:
    job = Job(load_classifier("zoo:tiny", device="cpu"), chosen(load_dataset("sample"), 2), Threat.square(5), masks=2)
    runs = [evaluate(job, tmp_path / name) for name in ("a", "b")]
    assert runs[0].metadata["entropy"] != runs[1].metadata["entropy"]
    assert evaluate(job, tmp_path / "a").metadata["entropy"] == runs[0].metadata["entropy"]
