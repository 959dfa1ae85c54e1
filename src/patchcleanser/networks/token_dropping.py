"""A ViT that leaves out the tokens it would see nothing in."""

from __future__ import annotations

from typing import Any

import torch
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from patchcleanser.errors import InputError


class TokenDropping(nn.Module):
    """A ViT told by one more channel which pixels are hidden."""

    mask_aware = True

    def __init__(self, vit: VisionTransformer) -> None:
        super().__init__()
        self.vit = vit

    def forward(self, inputs: Tensor) -> Tensor:
        """[N, C + 1, H, W] → logits."""
        logits: Tensor = without_hidden(self.vit, inputs)
        return logits


# How many tokens are left differs from batch to batch, and each number would be compiled anew.
@torch.compiler.disable  # type: ignore[untyped-decorator]
def without_hidden(vit: Any, inputs: Tensor) -> Tensor:
    """The logits of a ViT from its tokens with a visible pixel only."""
    images, hidden = inputs[:, :-1], inputs[:, -1] > 0.5
    tokens = vit.norm_pre(vit._pos_embed(vit.patch_embed(images)))
    seen = seen_tokens(hidden, tokens.shape[1] - vit.num_prefix_tokens)
    prefix = torch.ones(len(seen), vit.num_prefix_tokens, dtype=torch.bool, device=seen.device)
    keep = torch.cat([prefix, seen], dim=1)
    counts = keep.sum(1)
    rows, found = [], []
    for count in sorted(set(counts.tolist())):  # as many tokens, one batch
        rows.append(torch.nonzero(counts == count)[:, 0])
        kept = tokens[rows[-1]][keep[rows[-1]]].reshape(len(rows[-1]), count, -1)
        found.append(vit.forward_head(vit.norm(vit.blocks(kept))))
    logits: Tensor = torch.cat(found)[torch.cat(rows).argsort()]
    return logits


def seen_tokens(hidden: Tensor, tokens: int) -> Tensor:
    """Tokens with a visible pixel, bool [N, tokens]; all of them where an image is hidden whole."""
    number, height, width = hidden.shape
    down = round((tokens * height / width) ** 0.5)
    across = tokens // down
    if down * across != tokens or height % down or width % across:
        raise InputError(f"{tokens} tokens do not tile an input of {height}×{width} px")
    cells = hidden.reshape(number, down, height // down, across, width // across)
    seen = ~cells.all(dim=4).all(dim=2).reshape(number, tokens)
    return seen | ~seen.any(dim=1, keepdim=True)
