"""A Job to Records, and from stored records whatever needs no model."""

from patchcleanser.evaluation.jobs import Job
from patchcleanser.evaluation.rows import load_batch, rows_of
from patchcleanser.evaluation.workloads import evaluate

__all__ = ["Job", "evaluate", "load_batch", "rows_of"]
