"""Patch attacks: what an attacker can print, found by looking for it."""

from patchcleanser.attacks.pgd import Attacked, PatchPGD

__all__ = ["Attacked", "PatchPGD"]
