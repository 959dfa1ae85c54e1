"""Defenses, one per file, each with predict and certify side by side."""

from typing import Any

from patchcleanser.defenses.base import MaskDefense
from patchcleanser.defenses.challenger_masking import ChallengerMasking
from patchcleanser.defenses.contract import Defense
from patchcleanser.defenses.double_masking import DoubleMasking
from patchcleanser.defenses.minority_reports import MinorityReports

DEFENSES: dict[str, type[Defense[Any, Any]]] = {
    "double-masking": DoubleMasking,
    "challenger-masking": ChallengerMasking,
    "minority-reports": MinorityReports,
}

__all__ = ["DEFENSES", "ChallengerMasking", "Defense", "DoubleMasking", "MaskDefense", "MinorityReports"]
