"""The defenses that PatchCleanser is compared with: the network of each, the printed numbers, and the measured ones."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from patchcleanser.errors import RecordError
from patchcleanser.paper.experiments import Measurement, PaperRow, RunSpec, Values, published_values
from patchcleanser.records.metrics import Proportion

PATCHES = {"2": "2x2", "5": "5x5"}

Options = tuple[tuple[str, float], ...]


@dataclass(frozen=True)
class Baseline:
    """A defense, the network it needs, and how that network is trained."""

    defense: str
    method: str
    """Its name among the published methods; empty if the paper does not compare it."""
    folder: str
    network: str
    recipe: str
    epochs: int
    changes: tuple[str, ...] = ()
    """Further changes of the recipe."""
    by_patch: bool = False
    """Whether every patch size has weights of its own."""
    options: Options = ()
    """Options of the defense, where others than the published ones suit the network."""

    def name(self, patch: str) -> str:
        """The folder of the weights."""
        return f"{self.folder}-{patch}" if self.by_patch else self.folder

    def command(self, patch: str) -> str:
        """The command that trains the network, without --out."""
        words = ["patchcleanser", "train", "--model", self.network, "--recipe", self.recipe]
        for change in (f"epochs={self.epochs}", *self.changes):
            words += ["--set", change.format(patch=patch)]
        return shlex.join(words)

    def printed(self, patch: str) -> dict[str, float]:
        """Clean and certified accuracy that the paper prints for CIFAR-10, in percent; empty if none."""
        return published_values(self.method, "cifar10", int(patch), "clean", "certified")

    def row(self, patch: str) -> PaperRow:
        """Its row of Table 2."""
        spec = RunSpec(self.name(patch), "cifar10", patch, defense=self.defense, options=self.options)
        return PaperRow(spec, printed=self.printed(patch))


ABLATED = ("ablated", "net:ablated", "ds-cifar", 60)
BAGNET = ("bagnet", "net:bagnet?field=5", "bagnet-cifar", 40)
PATCHGUARD = ("patchguard", "net:bagnet?field=5", "patchguard-cifar", 50)
"""A BagNet, plain or trained for robust masking; 5 px see about what BagNet-17 sees of an image of 192×192."""
SQUASHED = (("scale", 0.15), ("shift", -2.5))
"""For our BagNet, whose logits have another range than the published one's; chosen on 1,000 training images."""
MARGIN, OWN_SIZE = ("margin=0.4",), ("cutout.smallest={patch}", "cutout.largest={patch}")

BASELINES = (
    Baseline("ds", "De-randomized smoothing", *ABLATED),
    Baseline("pg-ds", "PatchGuard, DS-ResNet", *ABLATED),
    Baseline("cbn", "Clipped BagNet", *PATCHGUARD, options=SQUASHED),
    Baseline("pg-bn", "PatchGuard, BagNet", *BAGNET),
    Baseline("pg-bn", "PatchGuard, BagNet", *PATCHGUARD),
    Baseline("patchguard++", "", *BAGNET),
    Baseline("bagcert", "BagCert", "bagcert", "net:bagnet?field=5&votes=true", "bagcert-cifar", 80, MARGIN),
    Baseline("ibp", "IBP", "interval", "net:interval", "ibp-cifar", 30, OWN_SIZE, by_patch=True),
    Baseline("ds", "", "smoothed-vit", "net:smoothed-vit", "smoothed-vit-cifar", 30),
)

RECOVERING = tuple(baseline for baseline in BASELINES if baseline.defense != "patchguard++")
"""Baselines that recover the label, so that their certificates count beside ours."""

Key = tuple[str, str, str | None, str, Options]


def row_key(row: Mapping[str, Any]) -> Key:
    """Defense, network, recipe, patch and options of a row of benchmarks/baselines.py; equal ones are repetitions."""
    options = tuple(sorted((row.get("options") or {}).items()))
    return row["defense"], row["network"], (row.get("recipe") or {}).get("name"), row["patch"], options


def read_baselines(path: Path) -> dict[str, Measurement]:
    """The rows that benchmarks/baselines.py wrote, by the keys of their rows in Table 2; empty if there is no file."""
    if not path.is_file():
        return {}
    try:
        rows = {row_key(row): _measurement(row) for row in json.loads(path.read_text(encoding="utf-8"))}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        message = f"{path} holds no rows of benchmarks/baselines.py ({error!r}); name another file with --baselines"
        raise RecordError(message) from error
    keys: dict[Key, str] = {
        (b.defense, b.network, b.recipe, PATCHES[patch], tuple(sorted(b.options))): b.row(patch).key
        for b in RECOVERING
        for patch in PATCHES
    }
    return {keys[key]: measurement for key, measurement in rows.items() if key in keys}


def _measurement(row: Mapping[str, Any]) -> Measurement:
    images = int(row["images"])
    values: Values = {
        name: Proportion(round(row[name] * images / 100), images)
        for name in ("undefended", "clean", "certified")
        if name in row
    }
    values |= {"classifications": float(row["classifications"]), "seconds": row["ms"] / 1000}
    provenance = {key: row[key] for key in ("command", "versions", "seed") if key in row}
    return Measurement(values, images, {"of": images, "precision": "exact", **provenance})
