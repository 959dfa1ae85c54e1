"""Results of defenses: verdicts on any image, certificates on labelled clean ones."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import numpy as np
from numpy.typing import NDArray

from patchcleanser.core.geometry import Size, Window


class Case(Enum):
    """How double-masking reached its label (the paper's Cases I, II and III)."""

    AGREED = "agreed"
    DISAGREER = "disagreer"
    MAJORITY = "majority"


@dataclass(frozen=True)
class Verdict:
    """The defended label of one image, which may carry a patch, and how it was reached.

    A verdict is never a certificate: this image need not be clean.
    """

    label: int
    case: Case
    one_mask_labels: tuple[int, ...]
    disagreers: tuple[int, ...]
    """Masks whose one-mask label is not the majority's."""
    deciding_mask: int | None
    """The mask that decided in the second round (Case II), the suspected place of a patch."""
    classifications: int
    """Labels computed for this image."""


@dataclass(frozen=True)
class Certificate:
    """Whether, for a clean image and its true label, no patch of the threat changes the answer.

    `certified` is the paper's two-mask correctness; `row_certified` is the weaker condition that suffices as well, so
    certified implies row_certified. If not certified, `failing_pair` names two masks under which the label is wrong;
    if not row-certified, `failing_placement` names patches the proof does not reach.
    """

    label: int
    certified: bool
    row_certified: bool
    failing_pair: tuple[int, int] | None
    failing_placement: tuple[Window, ...] | None
    margin: float
    """The smallest top-two logit margin among the labels looked at."""
    classifications: int
    positions: dict[Size, NDArray[np.bool_]] | None
    """Per patch shape, the top-left corners [rows, columns] proved safe; None if not requested."""
    unconfirmed: int = 0
    """Labels it rests on that were computed in lower precision only. 0: it is a proof; else it is statistical."""


@dataclass(frozen=True)
class LocalVerdict:
    """The defended label of one image, from many local scores; it is no certificate."""

    label: int
    classifications: int
    """Inputs classified for this image."""


@dataclass(frozen=True)
class LocalCertificate:
    """Whether, for a clean image and its true label, no patch of the threat changes an answer made of local scores."""

    label: int
    certified: bool
    failing_placement: tuple[Window, ...] | None
    """A patch the proof does not reach; None if certified."""
    margin: float
    """How far the true label stays ahead under the worst patch, in the defense's own scores; above 0 is certified."""
    classifications: int


@dataclass(frozen=True)
class DetectionVerdict:
    """Minority Reports' answer: the undefended label, or an alert instead of it."""

    label: int
    alert: bool
    one_mask_labels: tuple[int, ...]
    reporters: tuple[int, ...]
    """Masks whose confident label contradicts the undefended one."""
    classifications: int


@dataclass(frozen=True)
class DetectionCertificate:
    """Whether no patch of the threat can change the label of a clean image *unnoticed*.

    A weaker promise than a Certificate: under attack the answer may be an alert.
    """

    label: int
    detection_certified: bool
    failing_mask: int | None
    """A mask whose label is wrong or not confident enough; None if the undefended label fails."""
    margin: float
    classifications: int
