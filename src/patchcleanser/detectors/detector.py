"""Detector: what the defense needs of a model that sees objects; and detectors from strings."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from patchcleanser.classifiers.registry import parse_options, pick_device
from patchcleanser.core.detections import Detections
from patchcleanser.errors import InputError, did_you_mean


@runtime_checkable
class Detector(Protocol):
    """A function from one image to its detections, in pixels of that image.

    It must be a function: the same image gives the same detections. So it is called with one image at a time, and
    nothing else in a batch can change what it sees. It does its own resizing, thresholds and suppression.
    """

    classes: tuple[str, ...]
    """The names of the classes, by number."""
    device: torch.device

    @property
    def fingerprint(self) -> str:
        """A hash of everything that decides a detection: rows of another detector are never mistaken for its own."""

    def __call__(self, image: Tensor) -> Detections:
        """Boxes, classes and scores of one image [3, H, W] with values in [0, 1]."""


def require_detector(detector: Any) -> None:
    """Raise InputError unless it is a detector."""
    if not isinstance(detector, Detector) or not callable(detector):
        fix = f"; load one by its name with load_detector({detector!r:.80})" if isinstance(detector, str) else ""
        got = f"{detector!r:.80}{fix}"
        raise InputError(f"a detector has classes, device and fingerprint, and is called; got {got}")


def load_detector(spec: str, *, device: str = "auto") -> Detector:
    """A detector from a string `kind:name?option=value&…`.

    - ``yolox:yolox_nano.onnx``: a YOLOX network exported to ONNX, run by ONNX Runtime; ``?score=0.1&suppress=0.45``
    - ``torchvision:fasterrcnn_resnet50_fpn?weights=FILE``: a detector of torchvision; weights=hub, none or a file
    """
    kind, _, rest = spec.partition(":")
    if kind not in KINDS or not rest:
        kinds, hint = ", ".join(f"{kind}:…" for kind in KINDS), did_you_mean(kind, KINDS)
        raise InputError(f"cannot read detector {spec!r}; write one of {kinds}{hint}")
    name, _, query = rest.partition("?")
    options = parse_options(query)
    try:
        return KINDS[kind](name, pick_device(device), options)
    except TypeError as error:
        if "unexpected keyword" not in str(error):
            raise
        raise InputError(f"{kind}: detectors do not take {', '.join(sorted(options))}: {error}") from error


def _yolox(name: str, device: torch.device, options: dict[str, Any]) -> Detector:
    from patchcleanser.detectors.yolox import YoloxDetector

    default = {"providers": ["CPUExecutionProvider"]} if device.type == "cpu" else {}
    return YoloxDetector(Path(name), **(default | options))


def _torchvision(name: str, device: torch.device, options: dict[str, Any]) -> Detector:
    from patchcleanser.detectors.torchvision_detectors import TorchvisionDetector

    return TorchvisionDetector(name, device=device, **options)


KINDS: dict[str, Callable[[str, torch.device, dict[str, Any]], Detector]] = {
    "yolox": _yolox,
    "torchvision": _torchvision,
}
