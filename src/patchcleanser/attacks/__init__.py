"""Patch attacks: what an attacker can print, found by looking for it."""

from patchcleanser.attacks.adaptive import AdaptiveAttack, Challenged
from patchcleanser.attacks.apgd import PatchAPGD
from patchcleanser.attacks.base import Attack, Attacked, Settings
from patchcleanser.attacks.pgd import PatchPGD
from patchcleanser.attacks.square import PatchSquare
from patchcleanser.attacks.universal import PrintedPatch, Printing, UniversalPatch, apply_patch

ATTACKS: dict[str, type[Attack]] = {"pgd": PatchPGD, "apgd": PatchAPGD, "square": PatchSquare}
"""Attacks on the undefended classifier, by name."""

__all__ = [
    "ATTACKS",
    "AdaptiveAttack",
    "Attack",
    "Attacked",
    "Challenged",
    "PatchAPGD",
    "PatchPGD",
    "PatchSquare",
    "PrintedPatch",
    "Printing",
    "Settings",
    "UniversalPatch",
    "apply_patch",
]
