"""A Hugging Face image classifier."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from huggingface_hub.errors import HFValidationError
from PIL import Image

from patchcleanser.classifiers.hub import require_hub
from patchcleanser.classifiers.preprocessing import Interpolation, Preprocessing, Rounding, checked_image
from patchcleanser.classifiers.torch import TorchClassifier
from patchcleanser.core.geometry import Size
from patchcleanser.errors import ClassifierError, MissingDependencyError, PatchCleanserError

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
            options = {"trust_remote_code": False, "local_files_only": Path(name).is_dir()}
            if not Path(name).is_dir():
                _require_on_hub(name)
            try:
                _require_no_kernels(Path(name))
                model = transformers.AutoModelForImageClassification.from_pretrained(name, **options)
                if processor is None and preprocessing is None:
                    processor = transformers.AutoImageProcessor.from_pretrained(name, **options)
                    preprocessing = _preprocessing(processor, model)
            except PatchCleanserError:
                raise
            except Exception as error:  # a folder that is not what it says can fail anywhere in transformers
                reason = " ".join(str(error).split()) or type(error).__name__
                raise ClassifierError(f"transformers cannot load {name!r}: {reason}") from error
            model = model.eval().to(device or "cpu")
        preprocessing = preprocessing or _preprocessing(processor, model)
        super().__init__(model, preprocessing, classes=int(model.config.num_labels))


def _require_on_hub(name: str) -> None:
    """Refuse what is no folder, and no name of a model that the hub or its cache can have."""
    missing = f"transformers cannot load {name!r}: it is neither a folder nor a model of the hub"
    try:
        require_hub(name, ("config.json",), missing, "name a folder that save_pretrained wrote")
    except HFValidationError as error:
        raise ClassifierError(missing) from error


def _require_no_kernels(folder: Path) -> None:
    """Refuse a folder whose attention is compiled code from the hub, which transformers would fetch and run."""
    path = folder / "config.json"
    if path.is_file():
        for name, value in _settings(json.loads(path.read_text(encoding="utf-8"))):
            if name.endswith("_implementation") and "/" in str(value):
                raise ClassifierError(f"{path} names {value!r} as {name}, which is code from the hub; take it out")


def _settings(config: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """The settings of a config and of the configs in it."""
    for name, value in config.items():
        yield name, value
        if isinstance(value, dict):
            yield from _settings(value)


def _preprocessing(processor: Any, model: Any) -> Preprocessing:
    """That of the processor, compared on a photo; without a processor, that of the model's config."""
    if processor is None:
        return processor_preprocessing({}, model.config)
    preprocessing = processor_preprocessing(processor.to_dict(), model.config)
    _require_same(processor, preprocessing)
    return preprocessing


def processor_preprocessing(processor: dict[str, Any], config: Any) -> Preprocessing:
    """An image processor's settings as a Preprocessing."""
    scale = float(processor.get("rescale_factor", 1 / 255)) if processor.get("do_rescale", True) else 1.0
    if not math.isclose(scale, 1 / 255):
        raise ClassifierError(
            f"the image processor multiplies 8-bit pixels by {scale:g}, not 1/255; pass preprocessing="
        )
    resample = int(processor.get("resample", 2))
    if resample not in _RESAMPLE:
        raise ClassifierError(f"resampling filter {resample} is not supported; pass preprocessing=")
    resize, crop = _geometry(processor, config)
    mean = std = None
    if processor.get("do_normalize", True):
        mean = tuple(map(float, processor.get("image_mean") or (0.5,) * getattr(config, "num_channels", 3)))
        std = tuple(map(float, processor.get("image_std") or (0.5,) * len(mean)))
    rounding: Rounding = "even" if crop is None else "down"
    return Preprocessing(resize, crop, _RESAMPLE[resample], mean, std, crop_rounding=rounding)


def _geometry(processor: dict[str, Any], config: Any) -> tuple[int | Size | None, Size | None]:
    """The sizes to resize and to crop to."""
    crop = None
    if processor.get("do_center_crop") and (box := processor.get("crop_size")):
        crop = (int(box["height"]), int(box["width"]))
    side = getattr(config, "image_size", None)
    size = processor.get("size") or ({"height": side, "width": side} if isinstance(side, int) else {})
    if not size or not processor.get("do_resize", True):
        return None, crop
    if size.keys() == {"height", "width"}:
        return (int(size["height"]), int(size["width"])), crop
    if size.keys() != {"shortest_edge"}:
        raise ClassifierError(f"resizing to {dict(size)} is not supported; pass preprocessing=")
    edge = int(size["shortest_edge"])
    if not processor.get("crop_pct"):
        return edge, crop
    if crop is None and edge >= 384:  # ConvNeXt squashes large images, and crops small ones by itself
        return (edge, edge), None
    return int(edge / processor["crop_pct"]), crop or (edge, edge)


def _require_same(processor: Any, preprocessing: Preprocessing) -> None:
    """Refuse a processor whose code does more than its settings say.

    Both are compared on an image of smooth colours, where only rounding to 8 bits may differ.
    """
    if preprocessing.channels not in (None, 1, 3):
        return  # no PIL image has them
    rows, columns = np.linspace(0, 255, 480)[:, None], np.linspace(0, 255, 640)
    colours = np.stack([rows + 0 * columns, 0 * rows + columns, 255 - rows * columns / 255], axis=2)
    photo = Image.fromarray(colours.astype(np.uint8)).convert("L" if preprocessing.channels == 1 else "RGB")
    own = torch.as_tensor(processor(images=photo, return_tensors="pt")["pixel_values"])
    ours = preprocessing(checked_image(photo, preprocessing.channels)[None])
    if own.shape != ours.shape or float((own - ours).abs().max()) > 3 / 255 / min(preprocessing.std or (1.0,)):
        raise ClassifierError(f"{type(processor).__name__} does more than its settings say; pass preprocessing=")
