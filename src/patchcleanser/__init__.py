"""Certified defense of any image classifier against adversarial patches."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # the same names once more, for type checkers; tests/test_public_names.py compares
    from patchcleanser.classifiers import CallableClassifier as CallableClassifier
    from patchcleanser.classifiers import Classifier as Classifier
    from patchcleanser.classifiers import Preprocessing as Preprocessing
    from patchcleanser.classifiers import TorchClassifier as TorchClassifier
    from patchcleanser.classifiers import load_classifier as load_classifier
    from patchcleanser.classifiers.timm import timm_preprocessing as timm_preprocessing
    from patchcleanser.core.detections import Detections as Detections
    from patchcleanser.core.geometry import Window as Window
    from patchcleanser.core.masks import MaskSet as MaskSet
    from patchcleanser.core.results import Case as Case
    from patchcleanser.core.results import Certificate as Certificate
    from patchcleanser.core.results import Verdict as Verdict
    from patchcleanser.core.threats import Threat as Threat
    from patchcleanser.data import chosen as chosen
    from patchcleanser.data import load_dataset as load_dataset
    from patchcleanser.data.multilabel_sets import load_multilabel as load_multilabel
    from patchcleanser.data.object_sets import load_objects as load_objects
    from patchcleanser.defenses.challenger_masking import ChallengerMasking as ChallengerMasking
    from patchcleanser.defenses.double_masking import DoubleMasking as DoubleMasking
    from patchcleanser.defenses.minority_reports import MinorityReports as MinorityReports
    from patchcleanser.defenses.multilabel_masking import MultiLabelMasking as MultiLabelMasking
    from patchcleanser.defenses.object_seeker import ObjectSeeker as ObjectSeeker
    from patchcleanser.defenses.one_pass import OnePass as OnePass
    from patchcleanser.detectors import load_detector as load_detector
    from patchcleanser.errors import PatchCleanserError as PatchCleanserError
    from patchcleanser.evaluation import AttackJob as AttackJob
    from patchcleanser.evaluation import CertifiedAccuracy as CertifiedAccuracy
    from patchcleanser.evaluation import Job as Job
    from patchcleanser.evaluation import evaluate as evaluate
    from patchcleanser.evaluation import match_labels as match_labels
    from patchcleanser.evaluation.audit import audit as audit
    from patchcleanser.evaluation.audit import audited_job as audited_job
    from patchcleanser.evaluation.detect_jobs import DetectJob as DetectJob
    from patchcleanser.evaluation.multilabel_jobs import MultiLabelJob as MultiLabelJob
    from patchcleanser.records.run import Run as Run
    from patchcleanser.service.client import Client as Client

__version__ = "0.1.0"

_PUBLIC = {
    "classifiers": ("CallableClassifier", "Classifier", "Preprocessing", "TorchClassifier", "load_classifier"),
    "classifiers.timm": ("timm_preprocessing",),
    "core.detections": ("Detections",),
    "core.geometry": ("Window",),
    "core.masks": ("MaskSet",),
    "core.results": ("Case", "Certificate", "Verdict"),
    "core.threats": ("Threat",),
    "data": ("chosen", "load_dataset"),
    "data.multilabel_sets": ("load_multilabel",),
    "data.object_sets": ("load_objects",),
    "defenses": ("ChallengerMasking", "DoubleMasking", "MinorityReports", "OnePass"),
    "defenses.multilabel_masking": ("MultiLabelMasking",),
    "defenses.object_seeker": ("ObjectSeeker",),
    "detectors": ("load_detector",),
    "errors": ("PatchCleanserError",),
    "evaluation": ("AttackJob", "CertifiedAccuracy", "Job", "evaluate", "match_labels"),
    "evaluation.audit": ("audit", "audited_job"),
    "evaluation.detect_jobs": ("DetectJob",),
    "evaluation.multilabel_jobs": ("MultiLabelJob",),
    "records.run": ("Run",),
    "service.client": ("Client",),
}
"""Public names by module. They are imported when first used, so that `import patchcleanser` does not load torch."""

_MODULES = {name: f"patchcleanser.{module}" for module, names in _PUBLIC.items() for name in names}

if not TYPE_CHECKING:  # a type checker cannot read a computed list, and takes the imports above
    __all__ = sorted(_MODULES.keys() - {"Client"})  # Client needs the extra `serve`


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'patchcleanser' has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return sorted([*_MODULES, "__version__"])
