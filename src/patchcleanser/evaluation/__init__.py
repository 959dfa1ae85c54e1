"""Certify or attack the images of a job, and audit what came of it."""

from patchcleanser.evaluation.jobs import AttackJob, Job
from patchcleanser.evaluation.workloads import evaluate

__all__ = ["AttackJob", "Job", "evaluate"]
