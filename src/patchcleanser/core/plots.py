"""Verdicts and certificates drawn on their image."""

from __future__ import annotations

from typing import Any

import numpy as np
from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle
from numpy.typing import NDArray
from PIL import Image

from patchcleanser.core.geometry import Size, Window, image_window
from patchcleanser.core.pixels import pixels_of
from patchcleanser.core.results import Case, Certificate, Result
from patchcleanser.errors import ImageError

WEAK = (0.86, 0.0, 0.5)
"""The colour of what is not proved: pink, which photos seldom have; as shares of red, green and blue."""
PATCH: Any = {"hatch": "////", "edgecolor": WEAK, "linewidth": 1.5}
MASK: Any = {"linestyle": "--", "edgecolor": "white", "linewidth": 1.8}


CASES = {
    Case.COARSE: "all coarse masks agree",
    Case.AGREED: "all masks agree",
    Case.DISAGREER: "dashed: the mask that decided",
    Case.MAJORITY: "most masks agree",
}
"""How a verdict was reached, for the title of its picture."""

OTHER_IMAGE = (
    "draw it on the image that was classified (for a threat on the input grid the resized and cropped one: "
    "classifier.preprocessing.geometry(image[None])[0])"
)


def plot_result(result: Result, image: Any, ax: Axes | None) -> Axes:
    """Draw a result on its image; see Result.plot."""
    pixels = _rgb(image)
    _check_inside(result, (len(pixels), pixels.shape[1]))
    weak = _weak_places(result, (len(pixels), pixels.shape[1])) if isinstance(result, Certificate) else None
    axes = pyplot.subplots(figsize=(3.6, 3.6))[1] if ax is None else ax
    axes.imshow(pixels)
    axes.set_axis_off()
    if weak is None:
        for window in getattr(result, "failing_placement", None) or ():
            _frame(axes, window, PATCH)
    else:
        axes.imshow(np.dstack([np.broadcast_to(WEAK, pixels.shape), 0.55 * weak]))
    for window in getattr(result, "suspected", ()):
        _frame(axes, window, {**MASK, "linestyle": "-", "edgecolor": "black"})  # white dashes must show on white
        _frame(axes, window, MASK)
    axes.set_title(_title(result), fontsize=10)
    return axes


def _title(result: Any) -> str:
    """The label and what was decided or proved, in a few words."""
    if getattr(result, "alert", False):
        return "alert"
    if hasattr(result, "present"):  # several labels
        proof = f"{len(result.certified)} certified" if hasattr(result, "certified") else None
        return ", ".join([f"classes {' '.join(map(str, result.present)) or '-'}", *([proof] if proof else [])])
    proofs = ("certified", "row_certified", "detection_certified")
    flags = {name.replace("_", "-"): getattr(result, name, False) for name in proofs}
    # Of an object `certified` is a method: what is certified depends on the place of the patch.
    proof = next((name for name, flag in flags.items() if flag and not callable(flag)), None)
    if proof is None and hasattr(result, "margin"):
        proof = "not certified"
        if isinstance(result, Certificate):
            proof = _share_of_places(result) or "not certified\na map of all places needs maps=True"
    case = getattr(result, "case", None)
    return ", ".join([f"label {result.label}", *([proof] if proof else []), *([CASES[case]] if case else [])])


def _share_of_places(certificate: Certificate) -> str | None:
    """How many places of the patch are proved; None without a map."""
    places = [safe.ravel() for safe in (certificate.positions or {}).values()]
    if not places:
        return None
    percent = np.floor(1000 * np.concatenate(places).mean()) / 10
    return f"{percent:.1f}% of places proved\npink: patch centres that are not"


def _frame(axes: Axes, window: Window, looks: dict[str, Any]) -> None:
    corner = (window.left - 0.5, window.top - 0.5)
    axes.add_patch(Rectangle(corner, window.width, window.height, fill=False, clip_on=False, **looks))


def _check_inside(result: Result, size: Size) -> None:
    """Raise ImageError if a window of the result lies outside images of this size: it was of another one."""
    for name in ("suspected", "failing_placement"):
        for window in getattr(result, name, None) or ():
            if not image_window(size).contains(window):
                raise ImageError(f"window {window} lies outside this image of {size[0]}×{size[1]} px; {OTHER_IMAGE}")


def _weak_places(certificate: Certificate, size: Size) -> NDArray[np.bool_] | None:
    """[height, width]: pixels at which a patch of some shape may be centred and is not proved harmless."""
    if certificate.positions is None:
        return None
    weak = np.zeros(size, dtype=bool)
    room = certificate.region or Window(0, 0, *size)
    for (height, width), safe in certificate.positions.items():
        rows, columns = safe.shape
        if (rows + height - 1, columns + width - 1) != (room.height, room.width) or room.bottom > size[0]:
            raise ImageError(
                f"the map is for images of {rows + height - 1}×{columns + width - 1} px, got {size[0]}×{size[1]} px; "
                f"{OTHER_IMAGE}"
            )
        top, left = room.top + (height - 1) // 2, room.left + (width - 1) // 2
        weak[top : top + rows, left : left + columns] |= ~safe
    return weak


def _rgb(image: Any) -> NDArray[np.float32]:
    """An image as people have it (PIL, [C, H, W] or [H, W, C]) as [H, W, 3] in [0, 1]."""
    array = pixels_of(image) if isinstance(image, Image.Image) else image
    array = np.asarray(array.detach().cpu() if hasattr(array, "detach") else array)
    if array.ndim != 3 or not {1, 3} & {array.shape[0], array.shape[2]}:
        raise ImageError(
            f"one image is drawn: a PIL image or [channels, height, width], got {type(image).__name__} "
            f"of shape {array.shape}"
        )
    array = array.transpose(1, 2, 0) if array.shape[0] in (1, 3) else array
    pixels = array.astype(np.float32) / (255 if array.dtype == np.uint8 else 1)
    return np.ascontiguousarray(np.broadcast_to(pixels, (*pixels.shape[:2], 3)).clip(0, 1))
