"""Results of defenses: verdicts on any image, certificates on labelled clean ones."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from enum import Enum
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from patchcleanser.core.geometry import Size, Window

if TYPE_CHECKING:
    from matplotlib.axes import Axes


class Case(Enum):
    """How double-masking reached its label: by coarse masks, or by the paper's Cases I, II and III."""

    COARSE = "coarse"
    AGREED = "agreed"
    DISAGREER = "disagreer"
    MAJORITY = "majority"


class Result:
    """What every verdict and certificate can do."""

    def __repr__(self) -> str:
        facts = {entry.name: _plain(getattr(self, entry.name)) for entry in fields(self) if entry.repr}  # type: ignore[arg-type]
        shown = {name: f"{fact:.4g}" if isinstance(fact, float) else fact for name, fact in facts.items()}
        return (
            f"{type(self).__name__}({', '.join(f'{name}={fact}' for name, fact in shown.items() if fact is not None)})"
        )

    def __bool__(self) -> bool:
        raise TypeError(f"a {type(self).__name__} is neither true nor false; ask for one of its fields, as .certified")

    def to_dict(self) -> dict[str, Any]:
        """All fields as values that `json.dumps` takes; a window is [top, left, height, width].

        >>> LocalCertificate(3, False, (Window(0, 1, 5, 5),), -math.inf, 9).to_dict()["failing_placement"]
        [[0, 1, 5, 5]]
        """
        return {entry.name: _plain(getattr(self, entry.name)) for entry in fields(self)}  # type: ignore[arg-type]

    def plot(self, image: Any, *, ax: Axes | None = None) -> Axes:
        """Draw the image, and on it what decided: dashed masks, hatched patches, shaded places (matplotlib).

        A certificate with a map shades every pixel at which a patch may be centred and is not proved harmless. Without
        a map it shows one patch that the proof does not reach. A verdict shows the mask that decided. `image` is the
        one that was classified; for a threat on the input grid, the resized and cropped one, which is
        `classifier.preprocessing.geometry(image[None])[0]`.
        """
        from patchcleanser.core.plots import plot_result

        return plot_result(self, image, ax)


@dataclass(frozen=True, repr=False)
class Verdict(Result):
    """The defended label of one image, which may carry a patch, and how it was reached.

    A verdict is never a certificate: this image need not be clean.
    """

    label: int
    case: Case
    one_mask_labels: tuple[int, ...] = field(repr=False)
    """The labels under the masks of the round that answered: in the case COARSE the coarse masks."""
    disagreers: tuple[int, ...] = field(repr=False)
    """Masks whose one-mask label is not the majority's."""
    deciding_mask: int | None
    """The mask that decided in the second round (Case II), the suspected place of a patch."""
    classifications: int
    """Labels computed for this image."""
    suspected: tuple[Window, ...] = field(default=(), repr=False, compare=False)
    """The windows of the deciding mask."""


@dataclass(frozen=True, repr=False)
class Certificate(Result):
    """Whether, for a clean image and its true label, no patch of the threat changes the answer.

    `certified` is the paper's two-mask correctness; `row_certified` is the weaker condition that suffices as well, so
    certified implies row_certified. `failing_pair` names two masks under which the label is wrong, if there are such:
    after a coarse round it may be a coarse label alone that is. If not row-certified, `failing_placement` names patches
    the proof does not reach.
    """

    label: int
    certified: bool
    row_certified: bool
    failing_pair: tuple[int, int] | None
    failing_placement: tuple[Window, ...] | None = field(repr=False)
    margin: float
    """The smallest top-two logit margin among the labels looked at."""
    classifications: int
    positions: dict[Size, NDArray[np.bool_]] | None = field(repr=False, hash=False)
    """Per patch shape, the top-left corners [rows, columns] proved safe; None if not requested."""
    unconfirmed: int = field(default=0, repr=False)
    """Labels it rests on that were computed in lower precision only. 0: it is a proof; else it is statistical."""
    region: Window | None = field(default=None, repr=False)
    """The threat's region, from whose corner positions count."""

    def __repr__(self) -> str:
        """One that rests on labels of lower precision says that it is statistical."""
        text = super().__repr__()
        return f"{text[:-1]}, statistical: {self.unconfirmed} labels unconfirmed)" if self.unconfirmed else text

    def __eq__(self, other: object) -> bool:
        return self.to_dict() == other.to_dict() if isinstance(other, Certificate) else NotImplemented


@dataclass(frozen=True, repr=False)
class LocalVerdict(Result):
    """The defended label of one image, from many local scores; it is no certificate."""

    label: int
    classifications: int
    """Inputs classified for this image."""


@dataclass(frozen=True, repr=False)
class LocalCertificate(Result):
    """Whether, for a clean image and its true label, no patch of the threat changes an answer made of local scores."""

    label: int
    certified: bool
    failing_placement: tuple[Window, ...] | None
    """A patch the proof does not reach; None if certified."""
    margin: float
    """How far the true label stays ahead under the worst patch, in the defense's own scores; above 0 is certified."""
    classifications: int


@dataclass(frozen=True, repr=False)
class DetectionVerdict(Result):
    """Minority Reports' answer: the undefended label, or an alert instead of it."""

    label: int
    alert: bool
    one_mask_labels: tuple[int, ...] = field(repr=False)
    reporters: tuple[int, ...] = field(repr=False)
    """Masks whose confident label contradicts the undefended one."""
    classifications: int
    suspected: tuple[Window, ...] = field(default=(), repr=False, compare=False)
    """The windows of the reporting masks."""


@dataclass(frozen=True, repr=False)
class DetectionCertificate(Result):
    """Whether no patch of the threat can change the label of a clean image *unnoticed*.

    A weaker promise than a Certificate: under attack the answer may be an alert.
    """

    label: int
    detection_certified: bool
    failing_mask: int | None
    """A mask whose label is wrong or not confident enough; None if the undefended label fails."""
    margin: float
    classifications: int
    suspected: tuple[Window, ...] = field(default=(), repr=False, compare=False)
    """The windows of the failing mask."""


def _plain(value: Any) -> Any:
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, Window):
        return list(value.numbers)
    if isinstance(value, Mapping):
        return {key if isinstance(key, str) else f"{key[0]}x{key[1]}": _plain(item) for key, item in value.items()}
    if isinstance(value, np.ndarray | np.generic):
        return _plain(value.tolist())
    if isinstance(value, tuple | list):
        return [_plain(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
