"""A Hugging Face image classifier."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from patchcleanser.classifiers.preprocessing import Interpolation, Preprocessing
from patchcleanser.classifiers.torch import TorchClassifier
from patchcleanser.errors import ClassifierError, MissingDependencyError

# PIL's resampling numbers, as image processors store them.
_RESAMPLE: dict[int, Interpolation] = {0: "nearest", 2: "bilinear", 3: "bicubic"}


class TransformersClassifier(TorchClassifier):
    """Wraps an AutoModelForImageClassification, with the preprocessing of its image processor.

    `model` is a model in eval mode, a folder written by save_pretrained, or a hub name.
    """

    def __init__(
        self,
        model: Any,
        processor: Any = None,
        *,
        preprocessing: Preprocessing | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        try:
            import transformers
        except ImportError as error:
            raise MissingDependencyError.of("transformers", "transformers") from error
        if isinstance(model, (str, Path)):
            name = str(model)
            try:
                model = transformers.AutoModelForImageClassification.from_pretrained(name)
                if processor is None and preprocessing is None:
                    processor = transformers.AutoImageProcessor.from_pretrained(name)
            except (OSError, ValueError) as error:
                raise ClassifierError(f"transformers cannot load {name!r}: {error}") from error
            model = model.eval().to(device or "cpu")
        if preprocessing is None:
            preprocessing = processor_preprocessing(processor.to_dict() if processor is not None else {}, model.config)
        super().__init__(model, preprocessing, classes=int(model.config.num_labels))


def processor_preprocessing(processor: dict[str, Any], config: Any) -> Preprocessing:
    """What an image processor does, read from its settings."""
    side = getattr(config, "image_size", None)
    size = processor.get("size") or ({"height": side, "width": side} if isinstance(side, int) else {})
    resize = crop = None
    if processor.get("do_resize", True) and size:
        resize = int(size["shortest_edge"]) if "shortest_edge" in size else (int(size["height"]), int(size["width"]))
    if processor.get("do_center_crop") and (box := processor.get("crop_size")):
        crop = (int(box["height"]), int(box["width"]))
    mean = processor.get("image_mean") or (0.5,) * getattr(config, "num_channels", 3)
    std = processor.get("image_std") or (0.5,) * len(mean)
    resample = int(processor.get("resample", 2))
    if resample not in _RESAMPLE:
        raise ClassifierError(f"resampling filter {resample} is not supported; pass preprocessing=")
    return Preprocessing(
        resize=resize,
        crop=crop,
        interpolation=_RESAMPLE[resample],
        mean=tuple(float(v) for v in mean),
        std=tuple(float(v) for v in std),
    )
