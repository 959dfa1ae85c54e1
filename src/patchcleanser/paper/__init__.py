"""The paper's tables and figures, declared; a name for each."""

from patchcleanser.paper.answering import FIGURE10, TABLE7
from patchcleanser.paper.base import Experiment, Finding, Line, Plan
from patchcleanser.paper.detection import FIGURE9
from patchcleanser.paper.empirical import TABLE8
from patchcleanser.paper.main_results import TABLE2, TABLE3
from patchcleanser.paper.mask_counts import FIGURE4, FIGURE5
from patchcleanser.paper.objects import FIGURE20, FIGURE21, FIGURE22
from patchcleanser.paper.patch_sizes import FIGURE6, FIGURE8
from patchcleanser.paper.shapes import TABLE4
from patchcleanser.paper.training_effect import TABLE5, TABLE6

EXPERIMENTS: dict[str, Experiment] = {
    experiment.name: experiment
    for experiment in (
        TABLE2,
        TABLE3,
        TABLE4,
        TABLE5,
        TABLE6,
        TABLE7,
        TABLE8,
        FIGURE4,
        FIGURE5,
        FIGURE6,
        FIGURE8,
        FIGURE9,
        FIGURE10,
        FIGURE20,
        FIGURE21,
        FIGURE22,
    )
}

__all__ = ["EXPERIMENTS", "Experiment", "Finding", "Line", "Plan"]
