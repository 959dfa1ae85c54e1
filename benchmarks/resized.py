"""A ViT's weights for inputs of another size: its position embeddings are resampled, everything else stays.

    python benchmarks/resized.py runs/vit-112 runs/vit-224.safetensors --tokens 14

A ViT can so begin its training with a quarter of the tokens; results/notes/speed.md says what came of it.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from safetensors.torch import load_file, save_file
from timm.layers import resample_abs_pos_embed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("folder", type=Path, help="as `patchcleanser train` wrote it")
    parser.add_argument("out", type=Path, help="weights for timm:NAME?weights=")
    parser.add_argument("--tokens", type=int, required=True, help="along each side, without the class token")
    given = parser.parse_args()
    weights = load_file(given.folder / "model.safetensors")
    places = weights["pos_embed"]
    new = resample_abs_pos_embed(places.float(), [given.tokens] * 2, num_prefix_tokens=1)
    given.out.parent.mkdir(parents=True, exist_ok=True)
    save_file({**weights, "pos_embed": new.to(places.dtype).contiguous()}, given.out)


if __name__ == "__main__":
    main()
