"""Defenses, one per file, each with predict and certify side by side."""

from patchcleanser.defenses.base import Defense
from patchcleanser.defenses.challenger_masking import ChallengerMasking
from patchcleanser.defenses.double_masking import DoubleMasking
from patchcleanser.defenses.minority_reports import MinorityReports

__all__ = ["ChallengerMasking", "Defense", "DoubleMasking", "MinorityReports"]
