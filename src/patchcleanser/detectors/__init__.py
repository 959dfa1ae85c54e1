"""Anything that sees objects in an image, as a Detector: images in; boxes, classes and scores out."""

from patchcleanser.detectors.detector import Detector, load_detector

__all__ = ["Detector", "load_detector"]
