"""A network's first layers, computed once for many unions of masks: most of what they see is the same under all.

An output of the first layers that sees no pixel of a mask is what it is without the mask. So of each image the whole is
computed once, then what is around every mask once, and for a union of masks only where they come so near to each other
that some output sees two. All else is put together from these, and the network's other layers go on from there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby
from typing import NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from patchcleanser.classifiers.covering import covered, cropped
from patchcleanser.classifiers.layouts import Layout, Mask, Patch
from patchcleanser.core.masks import MaskSet
from patchcleanser.core.windows import Size, Window

TRIED = 24
TOLERATED = {torch.float32: 1e-4, torch.float16: 2e-2}
"""Of so many unions outputs are compared before any are used; kernels round differently for other sizes."""

KEPT = {"cpu": 500_000_000, "cuda": 8_000_000_000}
"""Bytes of results kept for images that are asked about again."""

Numbers = NDArray[np.int64]

Compute = Callable[[list[Tensor]], list[Tensor]]
"""Stacks of crops [N, C, h, w], each of another size → the first layers' outputs of each [N, c, h', w']."""


class Pairs(NamedTuple):
    """Images, by their numbers, each beside a union of masks, by its number."""

    which: NDArray[np.intp]
    unions: NDArray[np.intp]


class Plan:
    """What is to be computed, and where each output then is, for every union of a set, before any image is seen.

    Patches have numbers: 0 is the whole image, the next `once` - 1 are around windows, and all others between the
    windows of unions, in the order of the unions, the last of which hides nothing.
    """

    def __init__(self, layout: Layout, masks: MaskSet, outputs_of: Callable[[list[Size]], list[Size]]) -> None:
        unions: list[Mask] = [*masks.unions.masks, ()]
        around = layout.once(masks)
        between = [layout.between(mask) for mask in unions]
        self.once = 1 + len(around)
        self.patches = [layout.whole, *around.values(), *(patch for patches in between for patch in patches)]
        hidden = [(), *((window,) for window in around)]
        hidden += [mask for mask, patches in zip(unions, between, strict=True) for _ in patches]
        self.boxes = _boxes(self.patches, hidden)
        self.corners = np.array([(patch.crop.top, patch.crop.left) for patch in self.patches])
        shapes = [(patch.crop.height, patch.crop.width) for patch in self.patches]
        self.sizes = list(dict.fromkeys(shapes))
        """Of crops."""
        self.kinds = np.array([self.sizes.index(shape) for shape in shapes])
        """Of each patch, which size its crop has."""
        sizes = outputs_of(self.sizes)
        self.room = np.array([height * width for height, width in sizes])
        """How many outputs a crop of each size has."""
        self.begins = self.once + np.cumsum([0, *map(len, between)])
        among = [layout.among(patch).ravel() for patch in self.patches]
        within = [layout.within(patch, sizes[kind][1]) for patch, kind in zip(self.patches, self.kinds, strict=True)]
        self.lengths = np.array([len(numbers) for numbers in among])
        self.spans = np.cumsum([0, *self.lengths])
        """Where the outputs of each patch begin in the next two."""
        self.among, self.within = np.concatenate(among), np.concatenate([numbers.ravel() for numbers in within])
        if (self.within < 0).any() or (self.within >= np.repeat(self.room[self.kinds], self.lengths)).any():
            raise ValueError("crops have fewer outputs than they should")
        places = self._placed(dict(zip(around, range(1, self.once), strict=True)), unions, within)
        self.places = torch.from_numpy(places.reshape(len(unions), -1))

    def _placed(self, numbers: dict[Window, int], unions: list[Mask], within: list[Numbers]) -> NDArray[np.int32]:
        """Where each output of each union is among what is computed once [unions, down, across].

        Those that see two windows or more are not there; theirs are any, and put right later.
        """
        starts = self.starts(np.arange(self.once))
        whole = (starts[0] + within[0]).astype(np.int32)
        places = np.tile(whole, (len(unions), 1, 1))
        for union, mask in zip(places, unions, strict=True):
            for number in (numbers[window] for window in mask if window in numbers):
                patch = self.patches[number]
                union[patch.top : patch.bottom, patch.left : patch.right] = starts[number] + within[number]
        return places

    def groups(self, numbers: Numbers) -> list[Numbers]:
        """Which of some patches have crops of the same size, for each size that there is."""
        kinds = self.kinds[numbers]
        return [np.flatnonzero(kinds == kind) for kind in np.unique(kinds)]

    def starts(self, numbers: Numbers) -> Numbers:
        """Where the outputs of each patch begin, if these are computed in groups, one behind the other."""
        starts, begin = np.zeros(len(numbers), dtype=np.int64), 0
        for group in self.groups(numbers):
            room = int(self.room[self.kinds[numbers[group[0]]]])
            starts[group] = begin + room * np.arange(len(group))
            begin += room * len(group)
        return starts

    def several(self, unions: NDArray[np.intp]) -> tuple[Numbers, Numbers]:
        """Patches between the windows of unions, and for which of these each is."""
        unions = unions % (len(self.begins) - 1)
        counts = self.begins[unions + 1] - self.begins[unions]
        return _ranges(self.begins[unions], counts), np.repeat(np.arange(len(unions)), counts)


def _boxes(patches: Sequence[Patch], hidden: Sequence[Mask]) -> NDArray[np.int32]:
    """What masks hide of the crops of patches, [patches, windows, (top, bottom, left, right)]."""
    boxes = np.zeros((len(patches), max(1, *map(len, hidden)), 4), dtype=np.int32)
    for box, (*_, crop), mask in zip(boxes, patches, hidden, strict=True):
        for corners, w in zip(box, mask, strict=False):
            corners[:2] = np.clip((w.top - crop.top, w.bottom - crop.top), 0, crop.height)
            corners[2:] = np.clip((w.left - crop.left, w.right - crop.left), 0, crop.width)
    return boxes


def _ranges(begins: Numbers, counts: Numbers) -> Numbers:
    """So many numbers from each beginning on, one behind the other.

    >>> _ranges(np.array([5, 0, 7]), np.array([2, 0, 3])).tolist()
    [5, 6, 7, 8, 9]
    """
    before = np.cumsum(counts) - counts
    numbers: Numbers = np.repeat(begins - before, counts) + np.arange(int(counts.sum()))
    return numbers


class _Known(NamedTuple):
    """An image [C, H, W], and what was computed of it once, [outputs, c]."""

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
        self.masks = masks
        self._plan: Plan | None = None
        self._known: WeakKeyDictionary[object, _Known] = WeakKeyDictionary()

    def holds(self, image: Tensor) -> bool:
        """Whether outputs put together are those of the image [C, H, W] masked as a whole, for some of the unions."""
        every = len(self.masks.unions) + 1
        unions = np.random.default_rng(0).permutation(every)[:TRIED]
        together = self.outputs([self], lambda _: image, Pairs(np.zeros_like(unions), unions)).float()
        self.forget()
        copies = image.expand(len(unions), *image.shape).clone()
        (alone,) = self.first([covered(copies, self.masks.unions.boxes[unions], self.fill)])
        return bool((together - alone).abs().max() <= TOLERATED[alone.dtype] * alone.abs().max())

    def logits(self, owners: Sequence[object], pixels: Callable[[int], Tensor], pairs: Pairs) -> Tensor:
        """Logits of pairs."""
        return self.rest(self.outputs(owners, pixels, pairs))

    def outputs(self, owners: Sequence[object], pixels: Callable[[int], Tensor], pairs: Pairs) -> Tensor:
        """The first layers' outputs [N, c, h', w'] of pairs, channels last.

        Each image has an owner: what was computed of it is kept while that one lives. `pixels` gives an image
        [C, H, W], prepared.
        """
        used, which = np.unique(pairs.which, return_inverse=True)
        plan = self._plan or self._planned(pixels(used[0]))
        known = self._learnt(plan, owners, pixels, used.tolist())
        some = known[0].outputs
        unions = _sent(pairs.unions, some.device)
        put = some.new_empty(len(which), plan.places.shape[1], some.shape[1])
        start = 0
        for image, run in groupby(which.tolist()):
            stop = start + len(list(run))
            places = plan.places[unions[start:stop]].flatten()
            torch.index_select(known[image].outputs, 0, places, out=put[start:stop].view(-1, some.shape[1]))
            start = stop
        self._put_between(plan, put, [one.pixels for one in known], Pairs(which, pairs.unions))
        return put.view(len(which), *self.layout.outputs, -1).permute(0, 3, 1, 2)

    def _learnt(
        self, plan: Plan, owners: Sequence[object], pixels: Callable[[int], Tensor], which: list[int]
    ) -> list[_Known]:
        """What is computed once of images; of new ones it is computed now."""
        if sum(known.outputs.nbytes for known in self._known.values()) > KEPT[plan.places.device.type]:
            self.forget()
        once, learnt = np.arange(plan.once), []
        for i in which:
            known = self._known.get(owners[i])
            if known is None:
                image = pixels(i)
                known = _Known(image, self._computed(plan, [image], np.zeros_like(once), once))
                self._known[owners[i]] = known
            learnt.append(known)
        return learnt

    def forget(self) -> None:
        """Drop what was computed of images."""
        self._known.clear()

    def _planned(self, like: Tensor) -> Plan:
        def outputs_of(sizes: list[Size]) -> list[Size]:
            found = self.first([like.new_zeros(1, like.shape[0], *size) for size in sizes])
            return [(outputs.shape[-2], outputs.shape[-1]) for outputs in found]

        self._plan = Plan(self.layout, self.masks, outputs_of)
        self._plan.places = self._plan.places.to(like.device)
        return self._plan

    def _put_between(self, plan: Plan, put: Tensor, images: Sequence[Tensor], asked: Pairs) -> None:
        """Compute the outputs that see several windows of their union, and put them in their places [N, outputs, c]."""
        numbers, pairs = plan.several(asked.unions)
        if not len(numbers):
            return
        outputs = self._computed(plan, images, asked.which[pairs], numbers)
        lengths = plan.lengths[numbers]
        each = _ranges(plan.spans[numbers], lengths)
        into = np.repeat(pairs * put.shape[1], lengths) + plan.among[each]
        out_of = np.repeat(plan.starts(numbers), lengths) + plan.within[each]
        flat = put.view(-1, put.shape[2])
        flat[_sent(into, put.device)] = outputs.index_select(0, _sent(out_of, put.device))

    def _computed(self, plan: Plan, images: Sequence[Tensor], which: Numbers, numbers: Numbers) -> Tensor:
        """The outputs [outputs, c] of patches, each of one of the images, in groups, one behind the other."""
        stacks = []
        for group in plan.groups(numbers):
            mine = numbers[group]
            size = plan.sizes[plan.kinds[mine[0]]]
            crops = cropped(images, which[group], plan.corners[mine], size)
            stacks.append(covered(crops, plan.boxes[mine], self.fill))
        return torch.cat([found.permute(0, 2, 3, 1).flatten(0, 2) for found in self.first(stacks)])


def _sent(numbers: Numbers, device: torch.device) -> Tensor:
    """Numbers on a device; a GPU is not waited for."""
    tensor = torch.from_numpy(numbers)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor
