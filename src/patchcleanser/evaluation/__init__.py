"""Certify or attack the images of a job, and audit what came of it."""

from patchcleanser.evaluation.attack_jobs import AttackJob
from patchcleanser.evaluation.certified_accuracy import CertifiedAccuracy
from patchcleanser.evaluation.class_names import match_labels
from patchcleanser.evaluation.jobs import Job
from patchcleanser.evaluation.workloads import evaluate

__all__ = ["AttackJob", "CertifiedAccuracy", "Job", "evaluate", "match_labels"]
