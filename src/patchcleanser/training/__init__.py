"""Classifiers that survive masking: training from labels, and hardening without them."""

from patchcleanser.training.cutout import Ablation, Cutout, GreedyCutout
from patchcleanser.training.fit import fit
from patchcleanser.training.recipes import RECIPES, Recipe

__all__ = ["RECIPES", "Ablation", "Cutout", "GreedyCutout", "Recipe", "fit"]
