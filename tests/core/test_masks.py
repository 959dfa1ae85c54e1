import itertools
import random
from typing import Any

import numpy as np
import pytest

from patchcleanser import MaskSet, Threat, Window
from patchcleanser.core.cover import Mask, cover_of
from patchcleanser.core.geometry import Size
from patchcleanser.errors import CoverError, MaskError

PAPER_SHAPES = [(5, 224), (12, 83), (23, 38), (39, 20), (84, 12), (224, 5)]


def placements(threat: Threat, image: Size) -> list[Window]:
    """Every place of every maximal shape, counted out."""
    room = threat.room(image)
    return [
        Window(top, left, *shape)
        for shape in threat.shapes(image)
        for top in range(room.top, room.bottom - shape[0] + 1)
        for left in range(room.left, room.right - shape[1] + 1)
    ]


def hidden(mask: Mask, patches: tuple[Window, ...], image: Size) -> bool:
    """Whether a mask hides patches, pixel by pixel."""
    visible = np.ones(image, dtype=bool)
    for w in mask:
        visible[w.top : w.bottom, w.left : w.right] = False
    return not any(visible[p.top : p.bottom, p.left : p.right].any() for p in patches)


def brute_hole(masks: MaskSet, threat: Threat) -> tuple[Window, ...] | None:
    """The slow twin of MaskSet.uncovered: all placements, all masks, all pixels."""
    for patches in itertools.combinations_with_replacement(placements(threat, masks.image), threat.count):
        if not any(hidden(mask, patches, masks.image) for mask in masks.masks):
            return patches
    return None


def shrunk(masks: MaskSet, which: int) -> MaskSet:
    """The set with one window one pixel smaller."""
    windows = list(masks.masks)
    w = windows[which][0]
    windows[which] = (Window(w.top, w.left, w.height, w.width - 1), *windows[which][1:])
    return MaskSet(masks.image, tuple(windows))


THREATS = [
    (Threat.square(3), (9, 9), 3),
    (Threat.rectangle(2, 5), (9, 11), (3, 2)),
    (Threat.square(2, region=Window(2, 3, 5, 6)), (9, 10), 2),
    (Threat.any_rectangle(6), (9, 9), 3),
    (Threat.any_rectangle(5, region=Window(1, 1, 6, 4)), (8, 8), 2),
    (Threat.square(2, count=2), (6, 6), 2),
    (Threat.rectangle(1, 2, count=3), (3, 5), 2),
]


@pytest.mark.parametrize(("threat", "image", "k"), THREATS, ids=lambda v: str(v))
def test_built_sets_cover_and_sets_too_small_by_a_pixel_do_not(
    threat: Threat, image: Size, k: int | tuple[int, int]
) -> None:
    masks = MaskSet.build(threat, image=image, masks=k)
    assert masks.covers(threat)
    assert brute_hole(masks, threat) is None
    refuted = 0
    for which in range(len(masks)):
        smaller = shrunk(masks, which)
        hole = smaller.uncovered(threat)
        assert (hole is None) == (brute_hole(smaller, threat) is None)
        if hole is not None:
            refuted += 1
            assert not any(hidden(mask, hole, image) for mask in smaller.masks)
            with pytest.raises(CoverError, match=r"no mask hides the patch .* at row"):
                smaller.require_cover(threat)
    if threat.count == 1:
        assert refuted > 0


def test_the_check_agrees_with_counting_pixels_on_random_sets() -> None:
    """Windows of any size anywhere, masks of several windows, one and two patches."""
    rng = random.Random(7)
    outcomes = []
    for _ in range(300):
        image = (rng.randint(3, 7), rng.randint(3, 7))

        def window(image: Size = image) -> Window:
            top, left = rng.randrange(image[0]), rng.randrange(image[1])
            return Window(top, left, rng.randint(1, image[0] - top), rng.randint(1, image[1] - left))

        base = [tuple(window() for _ in range(rng.randint(1, 3))) for _ in range(rng.randint(1, 6))]
        masks = MaskSet(image, (*base, (Window(0, 0, image[0], rng.randint(1, image[1])),)))
        threat = Threat.rectangle(rng.randint(1, 2), rng.randint(1, 2), count=rng.randint(1, 2))
        hole = masks.uncovered(threat)
        outcomes.append(hole is None)
        assert (hole is None) == (brute_hole(masks, threat) is None)
        if hole is not None:
            assert not any(hidden(mask, hole, image) for mask in masks.masks)
    assert 30 < sum(outcomes) < 270  # both answers were tested


@pytest.mark.parametrize("count", [2, 3])
def test_k_patches_need_every_combination_of_masks(count: int) -> None:
    threat = Threat.square(4, count=count)
    masks = MaskSet.build(threat, image=(16, 16), masks=2)
    assert masks.covers(threat)
    for missing in [m for m in masks.masks if len(m) == count][:3]:
        fewer = MaskSet((16, 16), tuple(m for m in masks.masks if m != missing))
        hole = fewer.uncovered(threat)
        assert hole is not None
        assert len(hole) == count


def test_masks_built_for_one_patch_do_not_pass_for_two() -> None:
    masks = MaskSet.build(Threat.square(4), image=(16, 16), masks=3)
    assert masks.uncovered(Threat.square(4, count=2)) is not None


@pytest.mark.parametrize(
    ("threat", "image", "k", "masks", "unions"),
    [
        (Threat.square(32), (224, 224), 6, 36, 666),
        (Threat.square(23, count=2), (224, 224), 5, 325, 15_275),
        (Threat.square(5), (32, 32), (6, 4), 24, 300),
        (Threat.square(32), (32, 32), 6, 1, 1),
    ],
)
def test_number_of_masks_and_distinct_unions(
    threat: Threat, image: Size, k: int | tuple[int, int], masks: int, unions: int
) -> None:
    built = MaskSet.build(threat, image=image, masks=k)
    assert (len(built), len(built.unions)) == (masks, unions)


def test_unions_hide_exactly_what_their_two_masks_hide() -> None:
    masks = MaskSet.build(Threat.any_rectangle(9, count=1), image=(10, 10), masks=2)
    visible, unions = masks.visible(), masks.unions
    alone = MaskSet(masks.image, unions.masks)
    assert alone.masks == unions.masks  # distinct, and the masks themselves come first
    assert unions.masks[: len(masks)] == masks.masks
    for i, j in itertools.product(range(len(masks)), repeat=2):
        assert (alone.visible()[unions.index[i, j]] == (visible[i] & visible[j])).all()


def test_boxes_hide_what_visible_hides_and_the_last_hides_nothing() -> None:
    masks = MaskSet.build(Threat.square(2, count=2), image=(6, 7), masks=2)
    boxes = masks.unions.boxes
    everything = MaskSet(masks.image, masks.unions.masks).visible()
    for u in range(len(boxes)):
        visible = np.ones(masks.image, dtype=bool)
        for top, bottom, left, right in boxes[u]:
            visible[top:bottom, left:right] = False
        assert (visible == (everything[u] if u < len(everything) else np.ones(masks.image, dtype=bool))).all()


def test_our_family_for_any_one_percent_rectangle_needs_fewer_and_smaller_masks_than_the_papers() -> None:
    threat, image = Threat.any_rectangle(share=0.01), (224, 224)
    ours = MaskSet.build(threat, image=image, masks=6)
    paper = MaskSet(
        image, tuple(m for s in PAPER_SHAPES for m in MaskSet.build(Threat.rectangle(*s), image=image).masks)
    )
    assert ours.covers(threat)
    assert paper.covers(threat)
    assert (len(paper), len(paper.unions)) == (156, 12_246)
    assert (len(ours), len(ours.unions)) == (72, 2_628)
    assert (max(m[0].area for m in paper.masks), max(m[0].area for m in ours.masks)) == (9_184, 4_928)


@pytest.mark.parametrize("image", [(32, 32), (50, 200), (7, 300), (224, 224), (3, 3)])
@pytest.mark.parametrize("share", [0.01, 0.05, 0.3, 1])
def test_shape_families_cover_for_any_size_and_area(image: Size, share: float) -> None:
    threat = Threat.any_rectangle(share=share)
    assert MaskSet.build(threat, image=image, masks=4).covers(threat)
    assert MaskSet.build(threat, image=image, stride=(max(1, image[0] // 8), max(1, image[1] // 8))).covers(threat)


def test_positions_map_is_the_slow_count_for_one_and_two_patches() -> None:
    rng = np.random.default_rng(3)
    for threat, k in [(Threat.rectangle(2, 1), 3), (Threat.square(2, count=2), 2)]:
        masks = MaskSet.build(threat, image=(6, 5), masks=k)
        for _ in range(10):
            chosen = rng.random(len(masks)) < 0.8
            good = [m for m, c in zip(masks.masks, chosen, strict=True) if c]
            ((shape, safe),) = masks.hidden_positions(threat, chosen).items()
            every = placements(threat, masks.image)
            for p in every:
                rests = itertools.combinations_with_replacement(every, threat.count - 1)
                always_hidden = all(any(hidden(m, (p, *rest), masks.image) for m in good) for rest in rests)
                assert safe[p.top, p.left] == always_hidden
            assert safe.shape == (6 - shape[0] + 1, 5 - shape[1] + 1)


def test_a_subset_of_masks_covers_iff_the_checker_says_so_of_the_smaller_set() -> None:
    threat = Threat.square(3)
    masks = MaskSet.build(threat, image=(12, 12), stride=2)
    cover = cover_of(masks.masks, threat, masks.image)
    rng = np.random.default_rng(1)
    outcomes = set()
    for _ in range(60):
        chosen = rng.random(len(masks)) < 0.97
        smaller = MaskSet(masks.image, tuple(m for m, c in zip(masks.masks, chosen, strict=True) if c))
        outcomes.add(smaller.covers(threat))
        assert (cover.hole(chosen) is None) == smaller.covers(threat)
    assert outcomes == {True, False}


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: MaskSet.build(Threat.square(3), image=(9, 9), masks=0), "masks is a whole number of at least 1"),
        (lambda: MaskSet.build(Threat.square(3), image=(9, 9), masks=(2, 0)), "got (2, 0)"),
        (lambda: MaskSet.build(Threat.square(3), image=(9, 9), masks=2.5), "got 2.5"),
        (lambda: MaskSet.build(Threat.square(3), image=(9, 9), stride=0), "stride is a whole number"),
        (lambda: MaskSet.build(Threat.square(3), image=(9, 9), masks=3, stride=3), "not both"),
        (lambda: MaskSet.build(Threat.square(3, count=3), image=(99, 99), masks=8), "use fewer masks per axis"),
        (lambda: MaskSet((4, 4), ()), "at least 1 mask, got none"),
        (lambda: MaskSet((4, 4), ((),)), "at least 1 window, got none"),
        (lambda: MaskSet((4, 4), ((Window(2, 2, 3, 1),),)), "outside the image of 4×4 px"),
    ],
)
def test_bad_mask_sets_say_what_is_wrong(make, words: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(MaskError) as error:
        make()
    assert words in str(error.value)


@pytest.mark.parametrize("count", [1, 2, 3])
def test_masks_a_pixel_too_small_are_refuted_with_named_patches(count: int) -> None:
    image = (17, 14)
    # Positions divide evenly among the masks here, so there is no slack to hide in.
    smaller = MaskSet.build(Threat.rectangle(4, 5, count=count), image=image, masks=2)
    for threat in (Threat.rectangle(5, 5, count=count), Threat.rectangle(4, 6, count=count)):
        hole = smaller.uncovered(threat)
        assert hole is not None
        assert len(hole) == count
        assert not any(hidden(mask, hole, image) for mask in smaller.masks)
        assert MaskSet.build(threat, image=image, masks=2).covers(threat)


@pytest.mark.parametrize(
    "masks",
    [[[(0, 0, 32, 12)]], [Window(0, 0, 8, 8)], (Window(0, 0, 8, 8), Window(8, 8, 8, 8)), [["a"]]],
    ids=["numbers", "window", "windows", "text"],
)
def test_masks_that_are_no_tuples_of_windows_are_refused(masks: Any) -> None:
    with pytest.raises(MaskError, match=r"a mask is a tuple of windows, as \(Window"):
        MaskSet((32, 32), masks)


@pytest.mark.parametrize("image", [32.0, (32,), (32, "32")])
def test_the_size_of_a_mask_sets_image_is_two_whole_numbers(image: Any) -> None:
    with pytest.raises(MaskError, match="the side of an image is a whole number"):
        MaskSet(image, [(Window(0, 0, 8, 8),)])


def test_a_mask_set_prints_its_size_and_not_its_windows() -> None:
    assert repr(MaskSet.build(Threat.square(5), image=(32, 30), masks=6)) == "MaskSet(36 masks for images of 32×30 px)"
