"""When a label may be trusted: plain float32, ties, and fast labels checked against exact ones."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

Precision = Literal["exact", "fast"]
"""Float32 throughout, or a faster way (half precision, ONNX Runtime) with every doubtful label computed again."""

CALIBRATION = 512
FEWEST = 8
"""About so many labels of a group of clean images, and of no fewer images, are computed both ways before any fast one
is trusted. What one image, or two, teach about others is too little: seen with `tiny` in bfloat16."""

POOL = 2048
"""Up to half of them are the closest calls of so many others: images that a network is sure of move least."""

AUDIT = 1 / 512
"""The share of all further labels that are still computed both ways, whatever their margin."""

SAFETY = 2.0
"""Labels are doubtful up to this many times the largest movement seen."""

HOPELESS = 0.5
"""Where more than this share of the labels is doubtful, computing all of them exactly is cheaper."""

TIE = 1e-5
"""Kernels round differently for other batch sizes. A margin below this share of the logits' size
(below 2e-2 for half-precision networks) is a tie, and its label is that of the image alone."""


PATIENCE = 60.0
"""Seconds to wait for other threads; then they are disturbed, which is an error there, and never a wrong label."""


class WrongFastLabelError(Exception):
    """An audit caught a wrong fast label that was not doubtful: the group's labels are computed exactly."""


class TooFarError(WrongFastLabelError):
    """A doubtful label moved further than any was thought to: others may have, and are computed again."""


class _Movements:
    """How far logits moved between a fast way and the exact one, in a sample [N, C]."""

    def __init__(self, fast: Tensor, exact: Tensor) -> None:
        self._moved = fast.new_zeros(0, fast.shape[1])
        self._closest = 0.0
        self.add(fast, exact)

    def add(self, fast: Tensor, exact: Tensor) -> None:
        """More labels of both ways."""
        moved = torch.where(torch.isneginf(fast) & torch.isneginf(exact), 0.0, exact - fast)
        moved = moved.nan_to_num(nan=torch.inf, posinf=torch.inf, neginf=torch.inf)
        two = moved.gather(1, fast.topk(min(2, fast.shape[1]), dim=1).indices)
        self._closest = max(self._closest, float((two[:, 0] - two[:, -1]).abs().nan_to_num(nan=torch.inf).amax()))
        self._moved = torch.cat([self._moved, moved])
        self._bounds: dict[tuple[int, torch.device], Tensor] = {}

    def bounds(self, labels: list[int], device: torch.device) -> Tensor:
        """How near each class may come to each of these before a label is doubtful [len(labels), C], on a device.

        Of most pairs of classes the sample holds no close call: what the first two of any label moved counts for all.
        """
        for label in labels:
            if (label, device) not in self._bounds:
                apart = (self._moved - self._moved[:, label : label + 1]).abs().amax(0)
                apart = apart.nan_to_num(nan=torch.inf, posinf=torch.inf)
                self._bounds[label, device] = SAFETY * apart.clamp_min(self._closest).to(device)
        return torch.stack([self._bounds[label, device] for label in labels])


@dataclass
class Recheck:
    """Which fast labels are doubtful, what they cost, and whether they were right.

    What is doubtful is learnt from clean images only, a sample of the whole group that is about to be
    certified, and then fixed: neither the order of the images nor the size of chunks changes it, and
    images that somebody hands in to be classified cannot teach it anything. Only if a label turns out to have moved
    further, that is learnt too, and the group is computed once more.
    """

    labels: int = 0
    rechecked: int = 0
    """Labels computed again in float32."""
    flipped: int = 0
    """Of the rechecked ones, those whose fast label was wrong."""
    audited: int = 0
    """Labels that would have been trusted, computed in float32 all the same; a wrong one stops the fast labels."""
    caught: int = 0
    """Of the audited ones, those that were wrong: then all labels of the group are computed exactly."""
    hopeless: bool = False
    """The fast way does not pay for this model on these images, or an audit caught a wrong label."""

    share: float = 0.0
    """Of the sample it was learnt from, the share that was doubtful."""

    def __post_init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """Forget what was learnt; the counts go on."""
        self._moved: _Movements | None = None
        self._precision = 0.0
        self.hopeless, self._draws = False, np.random.default_rng(0)

    @property
    def ready(self) -> bool:
        """Whether fast labels may be used: it was learnt which ones are doubtful, and most are not."""
        return self._moved is not None and not self.hopeless

    def calibrate(
        self,
        fast: Tensor,
        exact: Tensor,
        resolution: float,
        *,
        common: Tensor | None = None,
        broken: int = 0,
        most: float = HOPELESS,
    ) -> None:
        """Learn how far classes move against each other, from the same labels computed both ways.

        A label flips if some class gains more on the first than it lay behind. A label is doubtful if some
        class lies no further behind than (twice) the most that just these two, or the first two of any label, were
        seen to move against each other, or than the fast way can tell apart at all. How many are doubtful is seen from
        the `common` ones, if the others were chosen; so many more were `broken`, and are doubtful anyway.
        """
        self.begin()
        self._moved = _Movements(fast, exact)
        self._precision = SAFETY * resolution
        self._common, self._broken = fast if common is None else common, broken
        self.hopeless = self._counted() > most

    def _counted(self) -> float:
        """How many of the common labels are doubtful."""
        doubtful, seen = int(self.doubt(self._common).sum()), len(self._common)
        self.share = (doubtful + self._broken) / max(1, seen + self._broken)
        return self.share

    def doubt(self, fast: Tensor) -> Tensor:
        """Which labels might be others in float32, bool [N]."""
        if not len(fast):
            return fast.new_zeros(0, dtype=torch.bool)
        first = fast.argmax(1, keepdim=True)
        behind = (fast.gather(1, first) - fast).nan_to_num(nan=0.0, posinf=torch.inf)
        return (behind <= self._limits(fast, first)).scatter(1, first, False).any(1)

    def too_far(self, fast: Tensor, finer: Tensor) -> Tensor:
        """Labels of which some class gained more on the first than was thought possible, bool [N]."""
        if not len(fast):
            return fast.new_zeros(0, dtype=torch.bool)
        first = fast.argmax(1, keepdim=True)
        ahead, now = (logits.gather(1, first) - logits for logits in (fast, finer))
        gained = torch.where(torch.isposinf(ahead) & torch.isposinf(now), 0.0, ahead - now)
        return (gained > self._limits(fast, first)).any(1)

    def widen(self, fast: Tensor, finer: Tensor) -> float:
        """Learn from these labels too; the share that is doubtful then."""
        if self._moved is not None:
            self._moved.add(fast, finer)
        return self._counted()

    def _limits(self, fast: Tensor, first: Tensor) -> Tensor:
        """How far behind the first each class is to lie [N, C]."""
        if self._moved is None:
            raise RuntimeError("nothing was learnt yet about fast labels")
        size = fast.abs().nan_to_num(posinf=0.0).amax(1, keepdim=True)
        labels = first[:, 0].tolist()
        places = {label: place for place, label in enumerate(dict.fromkeys(labels))}
        which = torch.tensor([places[label] for label in labels], device=fast.device)
        return self._moved.bounds([*places], fast.device)[which] + self._precision * size

    def sampled(self, number: int) -> Tensor:
        """Which of the next labels are audited, bool [number]."""
        self.labels += number
        return torch.from_numpy(self._draws.random(number) < AUDIT)

    @property
    def flip_rate(self) -> float:
        """With 95% confidence at most this share of the labels that were not computed in float32 is wrong.

        Clopper and Pearson's bound: if none of n audited ones was, about 3 / n.
        """
        return most_wrong(self.caught, self.audited)


def most_wrong(wrong: int, seen: int) -> float:
    """The share that is wrong, at most, with 95% confidence, if so many of those seen were.

    >>> round(most_wrong(0, 3000), 4), round(most_wrong(2, 3000), 4), most_wrong(0, 0)
    (0.001, 0.0021, 1.0)
    """
    if wrong >= seen:
        return 1.0
    low, high = wrong / seen, 1.0
    ways = [math.lgamma(seen + 1) - math.lgamma(k + 1) - math.lgamma(seen - k + 1) for k in range(wrong + 1)]
    for _ in range(60):
        share = (low + high) / 2
        few = sum(
            math.exp(number + k * math.log(share) + (seen - k) * math.log1p(-share)) for k, number in enumerate(ways)
        )
        low, high = (share, high) if few > 0.05 else (low, share)
    return high


def half_type(device: torch.device) -> torch.dtype | None:
    """The half precision this device is faster with, if any.

    float16 on CUDA: as fast as bfloat16 there and eight times as fine, so far fewer labels are
    doubtful. What overflows is computed again. bfloat16 on CPUs that have instructions for it.
    """
    if device.type == "cpu":
        supported = getattr(torch.cpu, "_is_avx512_bf16_supported", None)
        return torch.bfloat16 if supported and supported() else None
    return torch.float16 if device.type == "cuda" else None


def total(logits: Tensor) -> Tensor:
    """Logits that are numbers: NaN counts as -inf and +inf as the largest number.

    A patch may drive a network into NaN under the masks that do not hide it. A fixed rule for
    that keeps the classifier a total function, and with it the theorem.
    """
    return logits.nan_to_num(nan=-torch.inf, posinf=torch.finfo(logits.dtype).max, neginf=-torch.inf)


def gaps(logits: Tensor) -> Tensor:
    """Top-two margins [N]; two infinities are a tie."""
    two = logits.topk(2, dim=1).values
    return (two[:, 0] - two[:, 1]).nan_to_num(nan=0.0, posinf=torch.inf)


def ties(logits: Tensor, dtype: torch.dtype, seen: float = 0.0) -> Tensor:
    """Rows whose margin is within rounding of zero, bool [N]; `seen` is how far batches were seen to move logits."""
    size = logits.topk(2, dim=1).values.abs().nan_to_num(posinf=0.0).amax(1).clamp_min(1.0)
    return gaps(logits) <= max(TIE if dtype == torch.float32 else 2e-2, 4 * seen) * size


class _Wish(NamedTuple):
    """A setting of torch's that somebody wants while he is at work."""

    place: Any
    name: str
    value: Any
    weight: int = 0
    """Of two wishes for one setting the weightier one counts."""


_turn = threading.Condition()
_inside: set[object] = set()
"""Who computes in plain float32, whichever thread it is."""
_alone: int | None = None
"""The thread that has these settings to itself, if one does."""
_asking: set[object] = set()
"""Who waits to have them to himself: nobody new comes in before."""
_mine = threading.local()
"""How often this thread is inside."""
_wanted: dict[object, tuple[_Wish, ...]] = {}
"""What else somebody wants."""
_before: dict[tuple[int, str], tuple[Any, str, Any]] = {}
"""What the program had chosen for the settings that somebody wants otherwise now."""


def _settle() -> None:
    """Settings are the whole program's: they are what those who are at work want, and then what they were.

    In whichever order threads come and go, and however they are interrupted: who leaves settles again.
    """
    best: dict[tuple[int, str], _Wish] = {}
    for wishes in (*_wanted.values(), _plain() if _inside else ()):
        for wish in wishes:
            key = (id(wish.place), wish.name)
            if key not in best or best[key].weight < wish.weight:
                best[key] = wish
    for key, (place, name, value, _) in best.items():
        if key not in _before:
            _before[key] = place, name, getattr(place, name)
        setattr(place, name, value)
    for key in [key for key in _before if key not in best]:
        _put_back(*_before[key])
        del _before[key]


def _put_back(place: Any, name: str, value: Any) -> None:
    """One that followed a wider setting follows it again: reading it tells the wider one's value."""
    if name == "fp32_precision":
        setattr(place, name, "none")
        if getattr(place, name) == value:
            return
    setattr(place, name, value)


@contextmanager
def plain_float32(device: torch.device) -> Iterator[None]:
    """Float32 without TF32 or autocast, whatever the program's settings; they are put back.

    The settings are global, so they are changed when the first thread comes in and put back
    when the last one leaves.
    """
    me, within = object(), getattr(_mine, "inside", 0)
    try:
        with _turn:
            _turn.wait_for(lambda: within or _alone == threading.get_ident() or (_alone is None and not _asking))
            _inside.add(me)
            if len(_inside) == 1:
                _settle()
        _mine.inside = within + 1
        with torch.autocast(device.type, enabled=False):
            yield
    finally:
        _mine.inside = within
        with _turn:
            _inside.discard(me)
            if not _inside:
                _settle()
                _turn.notify_all()


@contextmanager
def plain_float32_alone(device: torch.device) -> Iterator[bool]:
    """Plain float32 in which `in_tf32` may be used: no other thread is in it, and those that come wait.

    False if another one is there already; then nothing is changed.
    """
    global _alone
    mine = _alone == threading.get_ident()
    try:
        with _turn:
            granted = not _inside and _alone is None
            _alone = threading.get_ident() if granted else _alone
        with plain_float32(device) if granted else nullcontext():
            yield granted
    finally:
        _release(mine)


@contextmanager
def others_wait() -> Iterator[None]:
    """No other thread is in plain float32 meanwhile; a thread that is in it itself cannot ask for that, and goes on.

    Whatever follows a network's code to write it down (torch.fx, torch.export) changes how layers are called, for all.
    """
    global _alone
    me, mine = object(), _alone == threading.get_ident()
    try:
        with _turn:
            if not mine and not getattr(_mine, "inside", 0):
                _asking.add(me)
                if _turn.wait_for(lambda: not _inside and _alone is None, PATIENCE):
                    _alone = threading.get_ident()
                _asking.discard(me)
                _turn.notify_all()
        yield
    finally:
        _asking.discard(me)
        _release(mine)


def _release(mine: bool) -> None:
    """What this thread did not have to itself before, it has no longer."""
    global _alone
    with _turn:
        if not mine and _alone == threading.get_ident():
            _alone = None
        _turn.notify_all()


@contextmanager
def in_tf32() -> Iterator[None]:
    """Products that a GPU computes from the first eleven bits of each number, inside `plain_float32_alone`.

    The settings are the program's: what other threads compute meanwhile, outside this package, is short too.
    """
    if _alone != threading.get_ident():
        raise RuntimeError("in_tf32 outside plain_float32_alone would change what other threads compute")
    cudnn = torch.backends.cudnn  # torch wants both its kinds of layers alike
    rooms = (torch.backends.cuda.matmul, cudnn, getattr(cudnn, "conv", None), getattr(cudnn, "rnn", None))
    short = [
        wish._replace(value="tf32" if wish.value == "ieee" else True, weight=2)
        for wish in _plain()
        if wish.place in rooms and wish.name in ("fp32_precision", "allow_tf32")
    ]
    with _wished(*short):
        yield


@contextmanager
def _wished(*wishes: _Wish) -> Iterator[None]:
    """Settings of torch's with other values; they are put back."""
    me = object()
    try:
        with _turn:
            _wanted[me] = wishes
            _settle()
        yield
    finally:
        with _turn:
            _wanted.pop(me, None)
            _settle()


def long_sums() -> AbstractContextManager[None]:
    """Let a GPU put sums of half-precision products together in float32."""
    return _wished(_Wish(torch.backends.cuda.matmul, "allow_fp16_reduced_precision_reduction", False))


def tuned(device: torch.device) -> AbstractContextManager[None]:
    """Let cuDNN pick its kernels by trying them, for batches of one shape; not while a thread wants plain float32."""
    return _wished(_Wish(torch.backends.cudnn, "benchmark", True)) if device.type == "cuda" else nullcontext()


@cache
def _plain() -> tuple[_Wish, ...]:
    """What makes float32 plain. Newer torch has one switch per kind of operation."""
    backends = torch.backends
    if hasattr(backends.cuda.matmul, "fp32_precision"):
        kinds = [(backends.cuda, "matmul")]
        kinds += [(room, kind) for room in (backends.cudnn, backends.mkldnn) for kind in ("conv", "rnn", "matmul")]
        plain = [_Wish(getattr(room, kind), "fp32_precision", "ieee", 1) for room, kind in kinds if hasattr(room, kind)]
    else:
        plain = [_Wish(room, "allow_tf32", False, 1) for room in (backends.cuda.matmul, backends.cudnn)]
    # Kernels chosen by trying them can be others next time.
    chosen = [_Wish(backends.cudnn, name, value, 1) for name, value in (("benchmark", False), ("deterministic", True))]
    return (*plain, *chosen)
