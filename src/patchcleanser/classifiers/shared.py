"""A network's first layers, computed once for many unions of masks: most of what they see is the same under all.

An output of the first layers that sees no pixel of a mask is what it is without the mask. So of each image the whole is
computed once, then what is around every mask once, and for a union of masks only where they come so near to each other
that some output sees two. All else is put together from these, and the network's other layers go on from there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import combinations, groupby
from typing import NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from patchcleanser.classifiers.covering import covered
from patchcleanser.classifiers.fields import Fields
from patchcleanser.core.masks import MaskSet
from patchcleanser.core.windows import Size, Window

LOOKED_AT = 1000
"""Unions by which it is judged what is saved."""

PLACES = 25_000_000
"""For each union it is noted where every output is to be found; with more numbers than this nothing is shared."""

KEPT = {"cpu": 500_000_000, "cuda": 8_000_000_000}
"""Bytes of results kept for images that are asked about again."""

Mask = tuple[Window, ...]

Compute = Callable[[list[Tensor]], list[Tensor]]
"""Stacks of crops [N, C, h, w], each of another size → the first layers' outputs of each [N, c, h', w']."""


class Pairs(NamedTuple):
    """Images, by their numbers, each beside a union of masks, by its number."""

    which: NDArray[np.intp]
    unions: NDArray[np.intp]


class Patch(NamedTuple):
    """Some of the first layers' outputs [top:bottom, left:right], and the crop of the image that they come from."""

    top: int
    bottom: int
    left: int
    right: int
    crop: Window

    @property
    def empty(self) -> bool:
        """Whether there are none."""
        return self.top >= self.bottom or self.left >= self.right


class Layout:
    """Where first layers with these fields and so many outputs, down and across, are to be computed for which masks."""

    def __init__(self, fields: Fields, outputs: Size, image: Size) -> None:
        self.fields, self.outputs, self.image = fields, outputs, image
        self.whole = Patch(0, outputs[0], 0, outputs[1], Window(0, 0, *image))
        self._around: dict[Window, Patch] = {}
        self._between: dict[Mask, list[Patch]] = {}

    def around(self, window: Window) -> Patch:
        """The outputs that see a pixel of a window."""
        if window not in self._around:
            spans = (window.top, window.bottom), (window.left, window.right)
            down, across = (
                field.touched(*span, count) for field, span, count in zip(self.fields, spans, self.outputs, strict=True)
            )
            self._around[window] = self._patch(*down, *across)
        return self._around[window]

    def between(self, mask: Mask) -> list[Patch]:
        """The outputs that see pixels of two windows of a mask or more, as patches that may overlap."""
        if mask not in self._between:
            patches = []
            for one, other in combinations([self.around(window) for window in mask], 2):
                top, bottom = max(one.top, other.top), min(one.bottom, other.bottom)
                left, right = max(one.left, other.left), min(one.right, other.right)
                if top < bottom and left < right:
                    patches.append(self._patch(top, bottom, left, right))
            self._between[mask] = patches
        return self._between[mask]

    def _patch(self, top: int, bottom: int, left: int, right: int) -> Patch:
        if top >= bottom or left >= right:
            return Patch(top, bottom, left, right, Window(0, 0, 1, 1))
        rows = self.fields[0].crop(top, bottom, self.image[0])
        columns = self.fields[1].crop(left, right, self.image[1])
        return Patch(top, bottom, left, right, Window(rows[0], columns[0], rows[1] - rows[0], columns[1] - columns[0]))

    def share(self, masks: MaskSet) -> float:
        """How much of the first layers' work is left, of one image under all unions of a set."""
        unions = masks.unions.masks
        looked_at = unions[:: -(-len(unions) // LOOKED_AT)]
        once = _area([self.whole, *self.once(masks).values()])
        each = sum(_area(self.between(mask)) for mask in looked_at) / len(looked_at)
        return (once / len(unions) + each) / (self.image[0] * self.image[1])

    def once(self, masks: MaskSet) -> dict[Window, Patch]:
        """What is to be computed once for an image: around each window that some output sees."""
        windows = dict.fromkeys(window for mask in masks.masks for window in mask)
        return {window: patch for window in windows if not (patch := self.around(window)).empty}

    def among(self, patch: Patch) -> NDArray[np.int64]:
        """The numbers of a patch's outputs among all, row by row, [rows, columns]."""
        return _numbers(patch, 0, 0, self.outputs[1])

    def within(self, patch: Patch, width: int) -> NDArray[np.int64]:
        """Their numbers among the outputs of its crop, which has so many across."""
        return _numbers(patch, patch.crop.top // self.fields[0].step, patch.crop.left // self.fields[1].step, width)


def _area(patches: Iterable[Patch]) -> int:
    return sum(patch.crop.area for patch in patches)


def _numbers(patch: Patch, top: int, left: int, width: int) -> NDArray[np.int64]:
    rows, columns = np.arange(patch.top, patch.bottom) - top, np.arange(patch.left, patch.right) - left
    return rows[:, None] * width + columns[None]


class _Job(NamedTuple):
    """Outputs to be computed: those of an image [C, H, W] hidden by a mask."""

    pixels: Tensor
    mask: Mask
    patch: Patch


class _Done(NamedTuple):
    """Outputs of many jobs [outputs, c]; of each job, where those of its crop begin, and how many there are across."""

    outputs: Tensor
    starts: list[int]
    widths: list[int]


class _Known(NamedTuple):
    """What was computed of an image [C, H, W]: the outputs of the whole and of the crop around each window."""

    pixels: Tensor
    outputs: Tensor


class Sharing:
    """The logits of images under unions of masks, by first layers whose outputs are put together, and the rest."""

    pays: bool | None = None
    """Whether it was seen to be faster than computing every pair alone; None: nobody looked."""

    def __init__(
        self, layout: Layout, masks: MaskSet, *, fill: Sequence[float], first: Compute, rest: Callable[[Tensor], Tensor]
    ) -> None:
        self.layout, self.fill, self.first, self.rest = layout, fill, first, rest
        self.unions: tuple[Mask, ...] = (*masks.unions.masks, ())
        """The last one hides nothing, as in a table of labels."""
        self._once = layout.once(masks)
        self._places = torch.empty(0, 0, dtype=torch.int32)
        self._known: WeakKeyDictionary[object, _Known] = WeakKeyDictionary()

    def logits(self, owners: Sequence[object], pixels: Callable[[int], Tensor], pairs: Pairs) -> Tensor:
        """Logits of pairs."""
        return self.rest(self.outputs(owners, pixels, pairs))

    def outputs(self, owners: Sequence[object], pixels: Callable[[int], Tensor], pairs: Pairs) -> Tensor:
        """The first layers' outputs [N, c, h', w'] of pairs, channels last.

        Each image has an owner: what was computed of it is kept while that one lives. `pixels` gives an image
        [C, H, W], prepared.
        """
        which = pairs.which.tolist()
        self._learn(owners, pixels, list(dict.fromkeys(which)))
        known = [self._known[owners[i]] for i in which]
        some = known[0].outputs
        numbers = torch.as_tensor(pairs.unions, device=some.device)
        put = some.new_empty(len(which), self._places.shape[1], some.shape[1])
        start = 0
        for _, run in groupby(which):
            stop = start + len(list(run))
            places = self._places[numbers[start:stop]].flatten()
            torch.index_select(known[start].outputs, 0, places, out=put[start:stop].view(-1, some.shape[1]))
            start = stop
        self._put_between(put, [one.pixels for one in known], pairs.unions.tolist())
        return put.view(len(which), *self.layout.outputs, -1).permute(0, 3, 1, 2)

    def _learn(self, owners: Sequence[object], pixels: Callable[[int], Tensor], which: list[int]) -> None:
        """Compute of new images what is computed once."""
        if sum(known.outputs.nbytes for known in self._known.values()) > KEPT[pixels(which[0]).device.type]:
            self._known.clear()
        for i in which:
            if owners[i] not in self._known:
                image = pixels(i)
                jobs = [_Job(image, (), self.layout.whole)]
                jobs += [_Job(image, (window,), patch) for window, patch in self._once.items()]
                done = self._computed(jobs)
                self._known[owners[i]] = _Known(image, done.outputs)
                if not len(self._places):
                    self._places = self._found(done).to(done.outputs.device)

    def _found(self, done: _Done) -> Tensor:
        """Where each output of each union is among what is computed once, int32 [unions + 1, outputs].

        Outputs that see two windows or more are not there; theirs are any, and put right later.
        """
        height, width = self.layout.outputs
        (whole, *starts), (across, *widths) = done.starts, done.widths
        places = np.tile(whole + self.layout.within(self.layout.whole, across).ravel(), (len(self.unions), 1))
        blocks = {
            window: (patch, start + self.layout.within(patch, width))
            for (window, patch), start, width in zip(self._once.items(), starts, widths, strict=True)
        }
        for union, mask in zip(places.reshape(-1, height, width), self.unions, strict=True):
            for patch, block in (blocks[window] for window in mask if window in blocks):
                union[patch.top : patch.bottom, patch.left : patch.right] = block
        return torch.from_numpy(places.astype(np.int32))

    def _put_between(self, put: Tensor, pixels: Sequence[Tensor], unions: Sequence[int]) -> None:
        """Compute the outputs that see several windows of their union, and put them in their places [N, outputs, c]."""
        jobs, numbers = [], []
        for n, (image, union) in enumerate(zip(pixels, unions, strict=True)):
            for patch in self.layout.between(self.unions[union]):
                jobs.append(_Job(image, self.unions[union], patch))
                numbers.append(n)
        if not jobs:
            return
        done = self._computed(jobs)
        there = [n * put.shape[1] + self.layout.among(job.patch).ravel() for n, job in zip(numbers, jobs, strict=True)]
        here = [
            start + self.layout.within(job.patch, width).ravel()
            for job, start, width in zip(jobs, done.starts, done.widths, strict=True)
        ]
        into, out_of = (torch.from_numpy(np.concatenate(parts)).to(put.device) for parts in (there, here))
        put.view(-1, put.shape[2])[into] = done.outputs.index_select(0, out_of)

    def _computed(self, jobs: Sequence[_Job]) -> _Done:
        """Run the first layers on the crops of jobs, those of one size together."""
        groups: dict[Size, list[int]] = {}
        for number, job in enumerate(jobs):
            groups.setdefault((job.patch.crop.height, job.patch.crop.width), []).append(number)
        stacks = [self._crops([jobs[number] for number in group]) for group in groups.values()]
        starts, widths, rows = [0] * len(jobs), [0] * len(jobs), []
        begin = 0
        for group, outputs in zip(groups.values(), self.first(stacks), strict=True):
            height, width = outputs.shape[-2:]
            for place, number in enumerate(group):
                starts[number], widths[number] = begin + place * height * width, width
            begin += len(group) * height * width
            rows.append(outputs.permute(0, 2, 3, 1).reshape(-1, outputs.shape[1]))
        return _Done(torch.cat(rows), starts, widths)

    def _crops(self, jobs: Sequence[_Job]) -> Tensor:
        """The crops of jobs, all of one size, with what is hidden of them hidden."""
        crops = torch.stack(
            [job.pixels[:, c.top : c.bottom, c.left : c.right] for job in jobs for c in [job.patch.crop]]
        )
        boxes = np.zeros((len(jobs), max(1, *(len(job.mask) for job in jobs)), 4), dtype=np.int32)
        for box, (_, mask, (*_, crop)) in zip(boxes, jobs, strict=True):
            for corners, window in zip(box, mask, strict=False):
                corners[:2] = np.clip((window.top - crop.top, window.bottom - crop.top), 0, crop.height)
                corners[2:] = np.clip((window.left - crop.left, window.right - crop.left), 0, crop.width)
        return covered(crops, boxes, self.fill)
