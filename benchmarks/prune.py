"""Make a trained ViT smaller: take the hidden units that matter least out of its MLPs.

    python benchmarks/prune.py FOLDER OUT --units 896

FOLDER is one that `patchcleanser train` wrote for net:vit; what comes out is trained further from `trained:OUT`.
A unit matters as much as the norm of what it reads, bias included, times the norm of what it writes.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from pathlib import Path

from safetensors.torch import load_file, save_file
from torch import Tensor

from patchcleanser.classifiers.trained import read_card
from patchcleanser.records.cache import checksum


def pruned(weights: dict[str, Tensor], units: int) -> dict[str, Tensor]:
    """The weights with so many hidden units in each MLP, in the order they had."""
    weights = dict(weights)
    for name in [name.removesuffix("fc1.weight") for name in weights if name.endswith("mlp.fc1.weight")]:
        reads, bias, writes = (weights[name + part].float() for part in ("fc1.weight", "fc1.bias", "fc2.weight"))
        matters = (reads.norm(dim=1) ** 2 + bias**2).sqrt() * writes.norm(dim=0)
        top = matters.argsort(descending=True)[:units].sort().values
        for part, tensor in (("fc1.weight", reads[top]), ("fc1.bias", bias[top]), ("fc2.weight", writes[:, top])):
            weights[name + part] = tensor.to(weights[name + part].dtype).contiguous()
    return weights


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("folder", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--units", type=int, default=896, help="hidden units left in each MLP")
    given = parser.parse_args()
    card = read_card(given.folder)
    if not card["model"].startswith("net:vit"):
        parser.error(f"{given.folder} holds {card['model']}, and only net:vit can be pruned")
    weights = pruned(load_file(given.folder / "model.safetensors"), given.units)
    width = weights["blocks.0.mlp.fc1.weight"].shape[1]
    given.out.mkdir(parents=True, exist_ok=True)
    save_file(weights, given.out / "model.safetensors")
    command = shlex.join(["python", "benchmarks/prune.py", *sys.argv[1:]])
    card |= {"model": f"net:vit?mlp={given.units / width:g}", "pruned_from": card["weights_sha256"], "command": command}
    card["weights_sha256"] = checksum(given.out / "model.safetensors")
    (given.out / "card.json").write_text(json.dumps(card, indent=1) + "\n", encoding="utf-8")
    print(f"wrote {given.out}; use it as trained:{given.out}")


if __name__ == "__main__":
    main()
