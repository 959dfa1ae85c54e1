"""Certified defense of any image classifier against adversarial patches."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from patchcleanser.classifiers import (
        CallableClassifier,
        Classifier,
        Preprocessing,
        TorchClassifier,
        load_classifier,
    )
    from patchcleanser.core.geometry import Window
    from patchcleanser.core.masks import MaskSet
    from patchcleanser.core.results import Case, Certificate, Verdict
    from patchcleanser.core.threats import Threat
    from patchcleanser.data import load_dataset
    from patchcleanser.defenses import ChallengerMasking, DoubleMasking, MinorityReports
    from patchcleanser.errors import PatchCleanserError
    from patchcleanser.evaluation import Job, evaluate
    from patchcleanser.records.run import Run
    from patchcleanser.service.client import Client as Client

__version__ = "0.1.0"

# Where each public name lives. They are imported when first used, so that `import patchcleanser`
# and everything in core stay free of torch.
_HOMES = {
    "CallableClassifier": "classifiers",
    "Case": "core.results",
    "Certificate": "core.results",
    "ChallengerMasking": "defenses",
    "Classifier": "classifiers",
    "Client": "service.client",
    "DoubleMasking": "defenses",
    "Job": "evaluation",
    "MaskSet": "core.masks",
    "MinorityReports": "defenses",
    "PatchCleanserError": "errors",
    "Preprocessing": "classifiers",
    "Run": "records.run",
    "Threat": "core.threats",
    "TorchClassifier": "classifiers",
    "Verdict": "core.results",
    "Window": "core.geometry",
    "evaluate": "evaluation",
    "load_classifier": "classifiers",
    "load_dataset": "data",
}

__all__ = [
    "CallableClassifier",
    "Case",
    "Certificate",
    "ChallengerMasking",
    "Classifier",
    "DoubleMasking",
    "Job",
    "MaskSet",
    "MinorityReports",
    "PatchCleanserError",
    "Preprocessing",
    "Run",
    "Threat",
    "TorchClassifier",
    "Verdict",
    "Window",
    "evaluate",
    "load_classifier",
    "load_dataset",
]
"""What `from patchcleanser import *` brings: all but Client, which needs the extra `serve`."""


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'patchcleanser' has no attribute {name!r}")
    return getattr(import_module(f"patchcleanser.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*_HOMES, "__version__"])
