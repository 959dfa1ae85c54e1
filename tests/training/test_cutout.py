"""Masks for training."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from patchcleanser.core.masks import MaskSet
from patchcleanser.core.threats import Threat
from patchcleanser.errors import InputError
from patchcleanser.training import Cutout, GreedyCutout
from patchcleanser.training.augment import augment
from patchcleanser.training.cutout import DefenseMasks, masked_inputs
from patchcleanser.training.recipes import RECIPES

INPUTS = torch.ones(64, 3, 32, 32)


def no_losses(hidden: Tensor) -> Tensor:
    raise AssertionError("plain cutout never asks the model")


def test_masks_inside_have_exactly_the_asked_size() -> None:
    hidden = Cutout(1, 9, 9, inside=True).choose(INPUTS, no_losses, torch.Generator().manual_seed(0))
    assert (hidden.sum((1, 2)) == 81).all()
    assert len({tuple(h.nonzero()[0].tolist()) for h in hidden}) > 40  # and lie in many places


def test_sizes_vary_between_the_bounds_and_shares_are_of_the_side() -> None:
    hidden = Cutout(1, 0.25, 0.5, inside=True).choose(INPUTS, no_losses, torch.Generator().manual_seed(0))
    sides = hidden.sum((1, 2)).sqrt()
    assert sides.min() >= 8
    assert sides.max() <= 16
    assert len(set(sides.tolist())) > 4


def test_centres_are_uniform_as_in_the_paper_so_masks_may_be_cut_off() -> None:
    hidden = Cutout(1, 16, 16).choose(INPUTS, no_losses, torch.Generator().manual_seed(0))
    assert hidden.sum((1, 2)).min() < 200
    assert hidden.any(0).all()  # every pixel is hidden in some image


def test_hidden_pixels_are_zero_and_the_rest_is_untouched() -> None:
    hidden = Cutout(2, 8, 8, inside=True).choose(INPUTS, no_losses, torch.Generator().manual_seed(0))
    masked = masked_inputs(nn.Identity(), INPUTS, hidden)
    zero = (masked == 0).all(1).sum((1, 2))
    assert (zero >= 64).all()
    assert (zero <= 128).all()
    assert set(masked.unique().tolist()) == {0.0, 1.0}


def test_no_masks_change_nothing() -> None:
    hidden = Cutout(0).choose(INPUTS, no_losses, torch.Generator())
    assert (masked_inputs(nn.Identity(), INPUTS, hidden) == INPUTS).all()


def test_a_mask_aware_network_is_told_what_is_hidden() -> None:
    network = nn.Identity()
    network.mask_aware = True  # type: ignore[assignment]
    hidden = Cutout(2, 8, 8, inside=True).choose(INPUTS, no_losses, torch.Generator().manual_seed(0))
    inputs = masked_inputs(network, INPUTS, hidden)
    assert (inputs[:, :3] == masked_inputs(nn.Identity(), INPUTS, hidden)).all()
    assert (inputs[:, 3] == hidden).all()
    assert (masked_inputs(network, INPUTS)[:, 3] == 0).all()


def test_greedy_masks_go_where_the_loss_is_worst() -> None:
    """A model that needs the top left corner: random masks rarely hide it, greedy ones do."""

    def losses(hidden: Tensor) -> Tensor:
        return hidden[:, :10, :10].float().sum((1, 2))

    generator = torch.Generator().manual_seed(0)
    plain = losses(Cutout(2, 8, 8, inside=True).choose(INPUTS, no_losses, generator)).mean()
    greedy = losses(GreedyCutout(2, 8, 8, inside=True, tries=8, share=1.0).choose(INPUTS, losses, generator)).mean()
    assert greedy > 3 * plain


def test_a_share_of_the_steps_is_greedy() -> None:
    calls = []

    def losses(hidden: Tensor) -> Tensor:
        calls.append(1)
        return torch.zeros(len(hidden))

    generator = torch.Generator().manual_seed(0)
    cutout = GreedyCutout(2, 8, 8, tries=3, share=0.25)
    for _ in range(200):
        cutout.choose(INPUTS[:2], losses, generator)
    assert 30 * 6 < len(calls) < 70 * 6


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Cutout(-1), "at least 0, got -1"),
        (lambda: Cutout(1, 9, 8), "0 < smallest <= largest, got 9 and 8"),
        (lambda: Cutout(1, 0, 8), "got 0 and 8"),
        (lambda: GreedyCutout(tries=0), "tries is at least 1"),
        (lambda: GreedyCutout(share=1.5), "share lies in"),
    ],
)
def test_bad_settings_say_what_is_wrong(make, words: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(InputError, match=words):
        make()


def test_digits_are_not_mirrored_where_the_recipe_says_so() -> None:
    images = torch.rand(32, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    for flip in (True, False):
        turned = augment(images, torch.Generator().manual_seed(1), shift=0, strength=0.0, flip=flip)
        assert (turned == images).all() != flip
    assert RECIPES["scratch-cifar"].changed({"flip": "false"}).flip is False


@pytest.mark.parametrize("threat", ["5", "3x9", "any:2%"])
@pytest.mark.parametrize("share", [0.0, 1.0])
def test_a_defenses_own_masks_are_shown_two_at_a_time_whatever_their_shape(threat: str, share: float) -> None:
    masks = MaskSet.build(Threat.parse(threat), image=(32, 32), masks=4)
    visible = torch.from_numpy(masks.visible())
    cutout = DefenseMasks(tries=2, share=share, visible=visible)
    hidden = cutout.choose(INPUTS, lambda tried: tried.float().mean((1, 2)), torch.Generator().manual_seed(0))
    unions = {(~(a & b)).numpy().tobytes() for a in visible for b in visible}
    shown_unions = {h.numpy().tobytes() for h in hidden}
    assert shown_unions <= unions
    assert len(shown_unions) > 8  # of 64
