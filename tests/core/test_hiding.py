"""Placements around an object, counted out; merging and its promise, on random boxes."""

import itertools
import tracemalloc

import numpy as np
import pytest

from patchcleanser import MaskSet, Threat, Window
from patchcleanser.core.detections import Detections, coverage, merge, promised_coverage
from patchcleanser.core.geometry import Size
from patchcleanser.core.hiding import PLACES, ObjectCertificate, certify_object, near_gap, placements
from patchcleanser.errors import MaskError, ThreatError


def every_rectangle(image: Size) -> list[Window]:
    """Every rectangle inside an image."""
    height, width = image
    sides = itertools.product(range(1, height + 1), range(1, width + 1))
    return [Window(top, left, h, w) for h, w in sides for top in range(height - h + 1) for left in range(width - w + 1)]


def place_of(patch: Window, box: Window, gap: int) -> str:
    """The class of a placement, by its distance in rows and columns."""
    rows = max(box.top - patch.bottom, patch.top - box.bottom, 0)
    columns = max(box.left - patch.right, patch.left - box.right, 0)
    return "over" if patch.overlaps(box) else "near" if max(rows, columns) < gap else "far"


@pytest.mark.parametrize("box", [Window(2, 3, 2, 2), Window(0, 0, 3, 4), Window(5, 8, 1, 1), Window(0, 2, 6, 3)])
@pytest.mark.parametrize("patch", ["2", "1x3", "any:4", "any:100%"])
def test_rooms_hold_the_placements_of_each_class_and_no_others(patch: str, box: Window) -> None:
    image, gap, threat = (6, 9), 2, Threat.parse(patch)
    shapes = threat.shapes(image)
    allowed = [
        w
        for w in every_rectangle(image)
        if any(w.height <= h and w.width <= v for h, v in shapes)
        and (patch.startswith("any") or (w.height, w.width) in shapes)
    ]
    rooms = list(placements(threat, box, image, gap))
    for window in allowed:
        inside = {place for place, shape, room in rooms if room.contains(window) and fits(window, shape, room)}
        assert place_of(window, box, gap) in inside
    for place, (height, width), room in rooms:
        for top in range(room.top, min(room.bottom, 6) - height + 1):
            for left in range(room.left, min(room.right, 9) - width + 1):
                assert place_of(Window(top, left, height, width), box, gap) == place


def fits(window: Window, shape: Size, room: Window) -> bool:
    """Whether the window is a part of a patch of this shape, somewhere in the room."""
    return window.height <= shape[0] <= room.height and window.width <= shape[1] <= room.width and room.contains(window)


@pytest.mark.parametrize("lines", [1, 2, 5])
def test_half_planes_cover_just_the_patches_that_do_not_span_all_lines(lines: int) -> None:
    image = (9, 13)
    masks = MaskSet.half_planes(image=image, lines=lines)
    rows = sorted({w.top for (w,) in masks.masks if w.width == 13} - {0})
    columns = sorted({w.left for (w,) in masks.masks if w.height == 9} - {0})
    for patch in every_rectangle(image):
        spans = [
            start < positions[0] and positions[-1] < stop
            for start, stop, positions in ((patch.top, patch.bottom, rows), (patch.left, patch.right, columns))
        ]
        hidden = any(window.contains(patch) for (window,) in masks.masks)
        assert hidden == (not all(spans))
        exact = Threat.rectangle(patch.height, patch.width, region=patch)
        assert masks.covers(exact) == hidden


@pytest.mark.parametrize("lines", [0, -1, 1.5])
def test_half_planes_need_lines(lines: int) -> None:
    with pytest.raises(MaskError, match="at least 1 line"):
        MaskSet.half_planes(image=(8, 8), lines=lines)


def random_detections(random: np.random.Generator, number: int) -> Detections:
    corners = np.sort(random.random((number, 2, 2)) * 10, axis=1).reshape(number, 4)
    return Detections(corners, random.integers(0, 2, number), random.random(number))


@pytest.mark.parametrize("seed", range(30))
def test_each_masked_box_is_covered_by_a_box_of_the_answer(seed: int) -> None:
    random = np.random.default_rng(seed)
    base, parts = random_detections(random, 4), [random_detections(random, 5) for _ in range(4)]
    answer = merge(base, parts, prune=0.7)
    for part in parts:
        shares = coverage(part.boxes, by=answer.boxes) * (part.classes[:, None] == answer.classes)
        assert (shares.max(axis=1) >= 0.7 - 1e-6).all()
    assert answer.boxes[: len(base)].tolist() == base.boxes.tolist()
    assert len(answer) <= len(base) + 20


@pytest.mark.parametrize("seed", range(30))
def test_the_answer_covers_what_masked_boxes_promise(seed: int) -> None:
    random = np.random.default_rng(seed)
    parts = [random_detections(random, 5) for _ in range(4)]
    (target,) = random_detections(random, 1).boxes
    for attempt in range(20):
        answer = merge(random_detections(random, attempt), parts, prune=0.7)
        same = answer.boxes[answer.classes == 0]
        covered = coverage(target[None], by=same).max(initial=0.0)
        assert covered >= max(promised_coverage(part, target, 0, prune=0.7) for part in parts)


def test_thousands_of_boxes_that_an_attacker_makes_do_not_fill_the_memory() -> None:
    random = np.random.default_rng(0)
    corners = random.random((5000, 2)) * 600
    boxes = np.hstack([corners, corners + 1 + random.random((5000, 2)) * 20])
    many = Detections(boxes, random.integers(0, 80, 5000), np.ones(5000))
    tracemalloc.start()
    assert len(merge(many.pick(slice(0, 10)), [many], prune=0.8)) > 4000
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 20e6  # a number for each pair of boxes takes 200 MB


def test_of_a_promise_of_nothing_more_than_nothing_is_wanted() -> None:
    masks, box = MaskSet.build(Threat.square(2), image=(8, 8), masks=2), Window(0, 0, 2, 2)
    nothing, all_of_it = (certify_object(masks, Threat.square(2), box, 0, np.full(4, p)) for p in (0.0, 1.0))
    assert not nothing.certified("far", 0.0)
    assert all_of_it.certified("far", 0.0)
    assert not ObjectCertificate(0, None, None, None, {}).certified("far", 0.0)


def test_boxes_with_nan_or_without_area_are_left_out() -> None:
    boxes = [[0, 0, 5, 5], [np.nan, 0, 5, 5], [3, 3, 3, 9], [20, 20, 30, 30], [-5, -5, np.inf, 2]]
    clipped = Detections(boxes, [0] * 5, [0.9] * 5).clipped((10, 10))
    assert clipped.boxes.tolist() == [[0, 0, 5, 5], [0, 0, 10, 2]]


def test_an_object_that_fills_the_image_has_no_placements_beside_it() -> None:
    masks = MaskSet.build(Threat.square(2), image=(6, 6), masks=2)
    certificate = certify_object(masks, Threat.square(2), Window(0, 0, 6, 6), 3, np.full(len(masks), 0.9))
    assert (certificate.over, certificate.near, certificate.far) == (0.9, None, None)
    assert certificate.certified("over", 0.9)
    assert not any(certificate.certified(place, 0.0) for place in PLACES[1:])


def test_the_weakest_placement_is_hidden_only_by_masks_that_promise_little() -> None:
    threat, masks = Threat.square(2), MaskSet.build(Threat.square(2), image=(8, 8), masks=3)
    promises = np.linspace(0, 1, len(masks))
    certificate = certify_object(masks, threat, Window(1, 1, 3, 3), 0, promises)
    for place in certificate.weakest:
        patch = certificate.weakest[place]
        hiding = [p for (window,), p in zip(masks.masks, promises, strict=True) if window.contains(patch)]
        assert getattr(certificate, place) == max(hiding)
        assert place_of(patch, Window(1, 1, 3, 3), near_gap((8, 8))) == place


def test_two_patches_at_once_are_refused() -> None:
    masks = MaskSet.build(Threat.square(1), image=(4, 4))
    with pytest.raises(ThreatError, match="1 patch at once"):
        certify_object(masks, Threat.square(1, count=2), Window(0, 0, 1, 1), 0, np.ones(len(masks)))
