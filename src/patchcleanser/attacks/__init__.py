"""Patch attacks: what an attacker can print, found by looking for it. Classes are imported when first used."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from patchcleanser.core.registry import Entry, load_name

if TYPE_CHECKING:
    from patchcleanser.attacks.adaptive import AdaptiveAttack
    from patchcleanser.attacks.apgd import PatchAPGD
    from patchcleanser.attacks.pgd import PatchPGD
    from patchcleanser.attacks.square import PatchSquare

_HERE = "patchcleanser.attacks"

ADAPTIVE = "adaptive"
"""The attack that knows the defense; the others attack the undefended classifier."""

ATTACKS: dict[str, Entry] = {
    "pgd": Entry(f"{_HERE}.pgd:PatchPGD", "PGD", "Projected gradient descent on the patch's pixels."),
    "apgd": Entry(f"{_HERE}.apgd:PatchAPGD", "Auto-PGD", "Gradient descent that adapts its own step size."),
    "square": Entry(f"{_HERE}.square:PatchSquare", "random search", "Random squares of pixels, without gradients."),
    ADAPTIVE: Entry(f"{_HERE}.adaptive:AdaptiveAttack", "adaptive", "Attacks the defense where its proof is weakest."),
}
"""Every attack by the name that users type. To add one: its file, and its entry here."""

__all__ = ["ADAPTIVE", "ATTACKS", "AdaptiveAttack", "PatchAPGD", "PatchPGD", "PatchSquare"]


def __getattr__(name: str) -> Any:
    return load_name(ATTACKS, __name__, name)
