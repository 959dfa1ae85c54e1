"""Defenses, one per file, each with predict and certify side by side."""

from typing import Any

from patchcleanser.defenses.bagcert import BagCert
from patchcleanser.defenses.base import MaskDefense
from patchcleanser.defenses.challenger_masking import ChallengerMasking
from patchcleanser.defenses.clipped_bagnet import ClippedBagNet
from patchcleanser.defenses.contract import Defense
from patchcleanser.defenses.double_masking import DoubleMasking
from patchcleanser.defenses.interval_bounds import IntervalBounds
from patchcleanser.defenses.minority_reports import MinorityReports
from patchcleanser.defenses.patchguard import PatchGuard, PatchGuardSmoothing
from patchcleanser.defenses.patchguard_pp import PatchGuardPlusPlus
from patchcleanser.defenses.smoothing import Smoothing

DEFENSES: dict[str, type[Defense[Any, Any]]] = {
    "double-masking": DoubleMasking,
    "challenger-masking": ChallengerMasking,
    "minority-reports": MinorityReports,
    "ds": Smoothing,
    "cbn": ClippedBagNet,
    "pg-bn": PatchGuard,
    "pg-ds": PatchGuardSmoothing,
    "bagcert": BagCert,
    "ibp": IntervalBounds,
    "patchguard++": PatchGuardPlusPlus,
}

__all__ = [
    "DEFENSES",
    "BagCert",
    "ChallengerMasking",
    "ClippedBagNet",
    "Defense",
    "DoubleMasking",
    "IntervalBounds",
    "MaskDefense",
    "MinorityReports",
    "PatchGuard",
    "PatchGuardPlusPlus",
    "PatchGuardSmoothing",
    "Smoothing",
]
