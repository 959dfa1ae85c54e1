"""Where a job runs."""

from patchcleanser.running.local import evaluate

__all__ = ["evaluate"]
