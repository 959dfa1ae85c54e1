"""A ViT that drops tokens without visible pixels."""

from __future__ import annotations

from typing import Any

import torch
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from patchcleanser.errors import InputError


class TokenDropping(nn.Module):
    """A ViT that drops hidden tokens; one more channel says which pixels are hidden."""

    mask_aware = True

    def __init__(self, vit: VisionTransformer) -> None:
        super().__init__()
        self.vit = vit

    def forward(self, inputs: Tensor) -> Any:
        """[N, C + 1, H, W] → logits."""
        return without_hidden(self.vit, inputs)


# The number of tokens left differs from batch to batch, and each one would be compiled again.
@torch.compiler.disable  # type: ignore[untyped-decorator]
def without_hidden(vit: Any, inputs: Tensor) -> Tensor:
    """The logits of a ViT computed from its tokens with a visible pixel only."""
    images, hidden = inputs[:, :-1], inputs[:, -1] > 0.5
    tokens = vit.norm_pre(vit._pos_embed(vit.patch_embed(images)))
    visible = visible_tokens(hidden, tokens.shape[1] - vit.num_prefix_tokens)
    prefix = torch.ones(len(visible), vit.num_prefix_tokens, dtype=torch.bool, device=visible.device)
    keep = torch.cat([prefix, visible], dim=1)
    counts = keep.sum(1)
    rows, parts = [], []
    for count in sorted(set(counts.tolist())):  # images with the same number of tokens form a batch
        rows.append(torch.nonzero(counts == count)[:, 0])
        remaining = tokens[rows[-1]][keep[rows[-1]]].reshape(len(rows[-1]), count, -1)
        parts.append(vit.forward_head(vit.norm(vit.blocks(remaining))))
    logits: Tensor = torch.cat(parts)[torch.cat(rows).argsort()]
    return logits


def visible_tokens(hidden: Tensor, tokens: int) -> Tensor:
    """Tokens with a visible pixel, bool [N, tokens]; all tokens of an image without any."""
    number, height, width = hidden.shape
    down = round((tokens * height / width) ** 0.5)
    across = tokens // down
    if down * across != tokens or height % down or width % across:
        raise InputError(f"{tokens} tokens do not tile an input of {height}×{width} px")
    cells = hidden.reshape(number, down, height // down, across, width // across)
    visible = ~cells.all(dim=4).all(dim=2).reshape(number, tokens)
    return visible | ~visible.any(dim=1, keepdim=True)
