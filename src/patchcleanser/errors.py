"""Every error this package raises on purpose.

    PatchCleanserError
    ├── InputError (also a ValueError)      a wrong argument
    │   ├── ThreatError                     an invalid patch, or one that fits no image
    │   ├── MaskError                       a mask set that cannot be built or used
    │   │   └── CoverError                  a mask set that misses a patch of the threat
    │   ├── ImageError                      pixels: type, range, shape, NaN
    │   └── LabelError                      labels: number, type, range
    ├── DataError                           a dataset that is missing, damaged or cannot be fetched
    ├── RecordError                         a run folder that is damaged, in use, or another job's
    ├── ClusterError                        a cluster out of reach, too small, or one that keeps losing workers
    ├── ContradictionError                  a certificate that was broken, or that the labels do not support
    ├── TrainingError                       a run that cannot go on, or does not fit its folder
    ├── ClassifierError                     the wrapped model cannot be loaded or used
    │   ├── TrainModeError                  dropout or batch statistics would make it random
    │   ├── NotAFunctionError               the same image got two different labels
    │   ├── OutputError                     wrong shape, NaN, too few classes
    │   └── OutOfMemoryError                not even one image fits on the device
    ├── TrustError                          an untrusted file names code to run or an address to fetch
    ├── ServiceError                        a running service refused a request, or cannot be reached
    └── MissingDependencyError (also an ImportError)   an optional extra is not installed

Messages say what is wrong, the value, the limit and, if there is one, the fix.
"""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


class PatchCleanserError(Exception):
    """Base of every error raised on purpose by patchcleanser."""

    @classmethod
    def unknown(cls, kind: str, name: object, names: Iterable[str], more: str = "") -> PatchCleanserError:
        """The error for a name that is none of `names`; `more` ends its message.

        >>> str(InputError.unknown("dataset", "Cifar", ["sample", "cifar10"]))
        "no dataset 'Cifar'; there are sample, cifar10; did you mean cifar10?"
        """
        names = list(names)
        return cls(f"no {kind} {name!r}; there are {', '.join(names)}{more}{did_you_mean(str(name), names)}")


class InputError(PatchCleanserError, ValueError):
    """A wrong argument."""


class ThreatError(InputError):
    """A patch that is invalid, or that fits no image."""


class MaskError(InputError):
    """A mask set that cannot be built or cannot be used here."""


class CoverError(MaskError):
    """A mask set that leaves some patch of the threat uncovered."""


class ImageError(InputError):
    """Pixels of the wrong type, range or shape."""


class LabelError(InputError):
    """Labels of the wrong number, type or range."""


class DataError(PatchCleanserError):
    """A dataset that is missing, damaged or cannot be fetched."""


class RecordError(PatchCleanserError):
    """A run folder that is damaged, in use, or belongs to another job."""


class ClusterError(PatchCleanserError):
    """A cluster that cannot be reached, is too small, or keeps losing workers."""


class ContradictionError(PatchCleanserError):
    """A certificate that an attack broke, or that the model's labels do not support. This must never happen."""


class TrainingError(PatchCleanserError):
    """A training run that cannot go on, or a folder that belongs to another run."""


class ClassifierError(PatchCleanserError):
    """The wrapped model cannot be loaded, or does not behave as a classifier must."""


class TrainModeError(ClassifierError):
    """The model is in train mode, or normalises with batch statistics."""


class NotAFunctionError(ClassifierError):
    """The same image got two different labels: no certificate could hold."""


class OutputError(ClassifierError):
    """The classifier returned something other than finite logits [images, classes]."""


class OutOfMemoryError(ClassifierError):
    """Not even one image at a time fits into the device's memory."""


class TrustError(PatchCleanserError):
    """A card or a manifest names code to run or an address to fetch, and the caller did not declare it trusted."""

    @classmethod
    def of(cls, file: object, spec: str, action: str) -> TrustError:
        return cls(
            f"{file} names {spec!r}, which {action}; a file may not ask for that by itself: if you trust its author, "
            "add --trust-code (in Python: trust_code=True)"
        )


class ServiceError(PatchCleanserError):
    """A running service refused a request, or cannot be reached; `code` is the error code of its response."""

    def __init__(self, message: str, *, code: str, status: int | None = None, request_id: str | None = None) -> None:
        super().__init__(message)
        self.code, self.status, self.request_id = code, status, request_id


class MissingDependencyError(PatchCleanserError, ImportError):
    """An optional dependency is not installed."""

    @classmethod
    def of(cls, package: str, extra: str) -> MissingDependencyError:
        return cls(f"{package} is not installed; run, in a clone of the repository: pip install '.[{extra}]'")


def first_line(error: BaseException) -> str:
    r"""The type of an error of the user's own code, and the first line of what it says.

    >>> first_line(TypeError("conv2d() received bad arguments, but expected one of:\n * (Tensor input)"))
    'TypeError: conv2d() received bad arguments'
    """
    lines = str(error).strip().splitlines()
    text = lines[0].removesuffix(":").removesuffix(", but expected one of") if len(lines) > 1 else str(error).strip()
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def did_you_mean(text: str, names: Iterable[str]) -> str:
    """The end of a sentence about a wrong name: the nearest right name, if any is near.

    >>> [did_you_mean(text, ["exact", "fast"]) for text in ("FST", "fsta", "half")]
    ['; did you mean fast?', '; did you mean fast?', '']
    """
    by_lower_case, typed = {name.lower(): name for name in names}, text.lower()
    swapped = [name for name in by_lower_case if sorted(name) == sorted(typed)]  # tyni: few letters in common order
    nearest = (get_close_matches(typed, by_lower_case, 1) or swapped)[:1]
    return "".join(f"; did you mean {by_lower_case[near]}?" for near in nearest)
