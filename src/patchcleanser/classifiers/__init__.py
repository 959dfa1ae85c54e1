"""Anything that classifies images, behind one protocol: images in, logits out."""

from patchcleanser.classifiers.classifier import CallableClassifier, Classifier
from patchcleanser.classifiers.preprocessing import Preprocessing
from patchcleanser.classifiers.registry import as_classifier, load_classifier
from patchcleanser.classifiers.torch import TorchClassifier

__all__ = [
    "CallableClassifier",
    "Classifier",
    "Preprocessing",
    "TorchClassifier",
    "as_classifier",
    "load_classifier",
]
