"""The defenses that PatchCleanser is compared with: the network each needs, what was printed, and what was measured."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from patchcleanser.errors import RecordError
from patchcleanser.paper.base import Finding, Line, Plan, Values
from patchcleanser.records.metrics import Proportion

PATCHES = {"2": "2x2", "5": "5x5"}


@dataclass(frozen=True)
class Baseline:
    """A defense, the network it needs, and what the paper prints for 2×2 and 5×5 px on CIFAR-10 (clean, certified)."""

    defense: str
    folder: str
    network: str
    recipe: str
    printed: tuple[tuple[float, float], tuple[float, float]] | None
    change: tuple[str, ...]
    by_patch: bool = False
    """Whether every patch size has weights of its own."""
    options: tuple[tuple[str, float], ...] = ()
    """Of the defense, where other numbers than the published ones suit the network."""

    def name(self, patch: str) -> str:
        """Of the folder with the weights."""
        return f"{self.folder}-{patch}" if self.by_patch else self.folder

    def training(self, root: str, patch: str) -> str:
        """The command that makes the weights."""
        words = ["patchcleanser", "train", "--model", self.network, "--recipe", self.recipe]
        for change in self.change:
            words += ["--set", change.format(patch=patch)]
        return f"{shlex.join(words)} --out {root}/{self.name(patch)}"

    def line(self, patch: str) -> Line:
        """Its row of Table 2."""
        shown = {} if self.printed is None else dict(zip(("clean", "certified"), self.said(patch) or (), strict=True))
        plan = Plan(self.name(patch), "cifar10", patch, defense=self.defense, options=self.options)
        return Line(plan, printed=shown)

    def said(self, patch: str) -> tuple[float, float] | None:
        """What the paper prints for a patch."""
        return None if self.printed is None else self.printed[list(PATCHES).index(patch)]


def _bagnet(
    defense: str,
    printed: tuple[tuple[float, float], tuple[float, float]] | None,
    folder: str = "bagnet",
    epochs: int = 40,
    options: tuple[tuple[str, float], ...] = (),
) -> Baseline:
    """A BagNet, plain or trained for robust masking; 5 px see about what BagNet-17 sees of an image of 192×192."""
    change = (f"epochs={epochs}",)
    return Baseline(defense, folder, "net:bagnet?field=5", f"{folder}-cifar", printed, change, options=options)


SQUASHED = (("scale", 0.15), ("shift", -2.5))
"""For our BagNet, whose logits are spread otherwise than the published one's; chosen on 1,000 training images."""


BASELINES = (
    Baseline("ds", "ablated", "net:ablated", "ds-cifar", ((83.9, 68.9), (83.9, 56.2)), ("epochs=60",)),
    Baseline("pg-ds", "ablated", "net:ablated", "ds-cifar", ((84.7, 69.2), (84.6, 57.7)), ("epochs=60",)),
    _bagnet("cbn", ((84.2, 44.2), (84.2, 9.3)), "patchguard", 50, SQUASHED),
    _bagnet("pg-bn", ((84.5, 63.8), (83.9, 47.3))),
    _bagnet("pg-bn", ((84.5, 63.8), (83.9, 47.3)), "patchguard", 50),
    _bagnet("patchguard++", None),
    Baseline(
        "bagcert",
        "bagcert",
        "net:bagnet?field=5&votes=true",
        "bagcert-cifar",
        ((86.0, 72.9), (86.0, 60.0)),
        ("epochs=80", "margin=0.4"),
    ),
    Baseline(
        "ibp",
        "interval",
        "net:interval",
        "ibp-cifar",
        ((65.8, 51.9), (47.8, 30.8)),
        ("epochs=30", "cutout.smallest={patch}", "cutout.largest={patch}"),
        by_patch=True,
    ),
    Baseline("ds", "smoothed-vit", "net:smoothed-vit", "smoothed-vit-cifar", None, ("epochs=30",)),
)

RECOVERING = tuple(baseline for baseline in BASELINES if baseline.defense != "patchguard++")
"""Those whose certificates can be counted beside ours."""


def lines() -> list[Line]:
    """Their rows of Table 2."""
    return [baseline.line(patch) for baseline in RECOVERING for patch in PATCHES]


Key = tuple[str, str, str | None, str, tuple[tuple[str, float], ...]]


def measured_by(row: Mapping[str, Any]) -> Key:
    """Defense, network, recipe, patch and options: of two rows that share them, one is a repetition."""
    options = tuple(sorted((row.get("options") or {}).items()))
    return row["defense"], row["network"], (row.get("recipe") or {}).get("name"), row["patch"], options


def measured(path: Path) -> dict[str, Finding]:
    """What benchmarks/baselines.py found, by the key of each line; nothing if there is no such file."""
    if not path.is_file():
        return {}
    try:
        rows = json.loads(path.read_text(encoding="utf-8"))
        keys: dict[Key, str] = {
            (b.defense, b.network, b.recipe, PATCHES[p], tuple(sorted(b.options))): b.line(p).key
            for b in RECOVERING
            for p in PATCHES
        }
        found = {measured_by(row): _finding(row) for row in rows}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise RecordError(f"{path} is no file of rows from benchmarks/baselines.py ({error!r})") from error
    return {keys[key]: finding for key, finding in found.items() if key in keys}


def _finding(row: Mapping[str, Any]) -> Finding:
    images = int(row["images"])
    values: Values = {
        name: Proportion(round(row[name] * images / 100), images)
        for name in ("undefended", "clean", "certified")
        if name in row
    }
    values |= {"classifications": float(row["classifications"]), "seconds": row["ms"] / 1000}
    noted = {key: row[key] for key in ("command", "versions", "seed") if key in row}
    return Finding(values, images, {"of": images, "precision": "exact", **noted})
