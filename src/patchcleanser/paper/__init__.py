"""The paper's tables and figures as experiments, by name."""

from patchcleanser.paper.accuracy import TABLE2, TABLE3, TABLE5, TABLE6
from patchcleanser.paper.comparisons import FIGURE9, FIGURE10, TABLE7, TABLE8
from patchcleanser.paper.experiments import Experiment, Measurement, PaperRow, RunSpec
from patchcleanser.paper.mask_and_patch_sizes import FIGURE4, FIGURE5, FIGURE6, FIGURE8, TABLE4
from patchcleanser.paper.objects import FIGURE20, FIGURE21, FIGURE22

_TABLES = (TABLE2, TABLE3, TABLE4, TABLE5, TABLE6, TABLE7, TABLE8)
_FIGURES = (FIGURE4, FIGURE5, FIGURE6, FIGURE8, FIGURE9, FIGURE10, FIGURE20, FIGURE21, FIGURE22)

EXPERIMENTS: dict[str, Experiment] = {experiment.name: experiment for experiment in (*_TABLES, *_FIGURES)}

__all__ = ["EXPERIMENTS", "Experiment", "Measurement", "PaperRow", "RunSpec"]
