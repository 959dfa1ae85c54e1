"""From a defense and a dataset to measured accuracies."""

from patchcleanser.evaluation.measure import Measured, measure

__all__ = ["Measured", "measure"]
