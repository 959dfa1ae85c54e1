"""Patch attacks: what an attacker can print, found by looking for it. Classes are imported when first used."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from patchcleanser.core.entries import Entry, load_name

ADAPTIVE = "adaptive"
"""The attack that knows the defense; the others attack the undefended classifier."""

ATTACKS: dict[str, Entry] = {
    "pgd": Entry("patchcleanser.attacks.pgd:PatchPGD", "PGD", "Projected gradient descent on the patch's pixels."),
    "apgd": Entry(
        "patchcleanser.attacks.apgd:PatchAPGD", "Auto-PGD", "Gradient descent that adapts its own step size."
    ),
    "square": Entry(
        "patchcleanser.attacks.square:PatchSquare", "random search", "Random squares of pixels, without gradients."
    ),
    ADAPTIVE: Entry(
        "patchcleanser.attacks.adaptive:AdaptiveAttack", "adaptive", "Attacks the defense where its proof is weakest."
    ),
}
"""Every attack by the name that users type. To add one: its file, and its entry here."""


_OTHERS = (
    "patchcleanser.attacks.adaptive:AdaptiveResult",
    "patchcleanser.attacks.flip_classes:attack_classes",
    "patchcleanser.attacks.hide_objects:attack_objects",
    "patchcleanser.attacks.patch_attack:Attack",
    "patchcleanser.attacks.patch_attack:AttackResult",
    "patchcleanser.attacks.patch_attack:AttackSettings",
    "patchcleanser.attacks.universal:PrintedPatch",
    "patchcleanser.attacks.universal:Printing",
    "patchcleanser.attacks.universal:UniversalPatch",
    "patchcleanser.attacks.universal:apply_patch",
)


_HOMES = [*(entry.home for entry in ATTACKS.values()), *_OTHERS]
_NAMES = sorted(home.partition(":")[2] for home in _HOMES)

if not TYPE_CHECKING:  # a type checker cannot read a computed list
    __all__ = _NAMES


def __getattr__(name: str) -> Any:
    return load_name(__name__, _HOMES, name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_NAMES])
