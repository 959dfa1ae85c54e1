"""What a BagNet sees, found out from gradients and not from kernel arithmetic."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from patchcleanser.classifiers.torch import TorchClassifier
from patchcleanser.core.receptive_fields import ReceptiveFields
from patchcleanser.core.threats import Threat
from patchcleanser.defenses import BagCert
from patchcleanser.errors import ClassifierError
from patchcleanser.networks.bagnet import BagNet
from patchcleanser.networks.builders import build_network


def moving_pixels(network: nn.Module, side: int, place: tuple[int, int]) -> torch.Tensor:
    """The pixels that move a local logit, bool [side, side], by gradients of many random images."""
    total = torch.zeros(side, side)
    for seed in range(4):
        torch.manual_seed(seed)
        image = torch.randn(1, 3, side, side, requires_grad=True)
        (grad,) = torch.autograd.grad(network.local(image)[0, :, place[0], place[1]].abs().sum(), image)
        total += grad[0].abs().sum(0)
    return total > 0


@pytest.mark.parametrize(
    ("name", "options", "side", "field", "jump"),
    [
        ("bagnet", {"field": 3, "width": 16, "depth": 2}, 12, 3, 1),
        ("bagnet", {"field": 7, "width": 16, "depth": 3}, 16, 7, 1),
        ("bagnet", {"field": 9, "width": 16, "depth": 3, "stride": 2}, 17, 9, 2),
        ("bagnet17", {"classes": 4, "threes": 2}, 25, 9, 8),
        ("bagnet17", {"classes": 4}, 41, 17, 8),
        ("bagnet17", {"classes": 4, "threes": 4}, 49, 33, 8),
    ],
)
def test_gradients_find_exactly_the_receptive_fields(
    name: str, options: dict, side: int, field: int, jump: int
) -> None:  # type: ignore[type-arg]
    torch.manual_seed(0)
    network = build_network(name, options).eval()
    assert isinstance(network, BagNet)
    assert (network.field, network.jump) == (field, jump)
    sight = ReceptiveFields.fields((side, side), network.field, network.jump)
    assert network.local(torch.zeros(1, 3, side, side)).shape[2:] == sight.grid
    for place in ((0, 0), (sight.grid[0] - 1, 0), (sight.grid[0] // 2, sight.grid[1] - 1)):
        expected = sight.down[place[0]][:, None] & sight.across[place[1]][None]
        assert torch.equal(moving_pixels(network, side, place), torch.from_numpy(expected))


def test_the_output_is_the_mean_of_local_logits_or_the_share_of_votes() -> None:
    images = torch.randn(2, 3, 12, 12)
    for votes in (False, True):
        network = build_network("bagnet", {"field": 5, "width": 16, "depth": 2, "votes": votes}).eval()
        local = network.local(images)
        expected = (local > 0).float().mean((2, 3)) if votes else local.mean((2, 3))
        assert torch.allclose(network(images), expected, atol=1e-6)
        (result,) = BagCert(TorchClassifier(network), Threat.square(1)).examine(images[:1].sigmoid(), [0])
        assert result.undefended == int(network(images[:1].sigmoid()).argmax())


def test_a_field_that_no_such_network_has_is_refused() -> None:
    with pytest.raises(ClassifierError, match="has no field of 4 px; the next is 5"):
        build_network("bagnet", {"field": 4})
    with pytest.raises(ClassifierError, match="needs at least 4 blocks, got depth=2"):
        build_network("bagnet", {"field": 11, "depth": 2})
