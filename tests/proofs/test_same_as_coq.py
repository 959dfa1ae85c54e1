"""The definitions that were proved and the program give the same answers."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Sequence
from functools import cache, partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from patchcleanser import MaskSet, Threat
from patchcleanser.core import masks as mask_sets
from patchcleanser.core.algorithms import (
    LabelFlow,
    R,
    certification_flow,
    challenger_flow,
    challenger_masking,
    coarse_first_flow,
    detection_certification_flow,
    detection_flow,
    double_masking_flow,
    majority_label,
)
from patchcleanser.core.geometry import Size, Window, axis_starts, axis_stride
from patchcleanser.core.label_table import UNMASKED, LabelTable
from patchcleanser.core.mask_families import MaskGrid, covering_family
from patchcleanser.core.receptive_fields import ReceptiveFields
from patchcleanser.core.results import Case
from patchcleanser.core.threats import AnyRectangle
from patchcleanser.defenses.local_defense import ImageScores, summed_margin
from patchcleanser.defenses.patchguard import PatchGuard
from proofs.coq import compute, coq, needs_coq

pytestmark = needs_coq

MASK_SETS, TABLES = 600, 4
CASES = {Case.AGREED: 0, Case.DISAGREER: 1, Case.MAJORITY: 2}


def window(w: Window) -> str:
    return f"Window {w.top} {w.left} {w.height} {w.width}"


def windows(mask: Sequence[Window]) -> str:
    return f"[{'; '.join(map(window, mask))}]"


def random_window(rng: random.Random, image: Size) -> Window:
    height, width = (rng.randint(1, side) for side in image)
    return Window(rng.randint(0, image[0] - height), rng.randint(0, image[1] - width), height, width)


def random_threat(rng: random.Random, image: Size) -> Threat:
    region = random_window(rng, image) if rng.random() < 0.3 else None
    room = region or Window(0, 0, *image)
    count = rng.choice([1, 1, 1, 2])
    if rng.random() < 0.3:
        return Threat.any_rectangle(rng.randint(1, 4), count=count, region=region)
    side = [rng.randint(1, min(2, side)) for side in (room.height, room.width)]
    return Threat.rectangle(*side, count=count, region=region)


def random_masks(rng: random.Random, threat: Threat, image: Size) -> MaskSet:
    """A set as the program builds it, sometimes with a mask left out or shortened, or any windows."""
    if rng.random() < 0.2:
        number = rng.randint(1, 5)
        masks = [tuple(random_window(rng, image) for _ in range(rng.randint(1, 3))) for _ in range(number)]
        return MaskSet(image, tuple(masks))
    built = list(MaskSet.build(threat, image=image, masks=rng.randint(1, 3)).masks)
    if rng.random() < 0.3 and len(built) > 1:
        built.remove(rng.choice(built))
    if rng.random() < 0.3:
        mask = rng.choice(built)
        shorter = tuple(Window(w.top, w.left, w.height, max(1, w.width - 1)) for w in mask)
        built[built.index(mask)] = shorter
    return MaskSet(image, tuple(built))


def random_table(rng: random.Random, masks: MaskSet) -> LabelTable:
    """Mostly the true label 1; the more wrong labels, the less often."""
    wrong = rng.choice([0, 0.02, 0.1, 0.5])
    table = LabelTable(masks)
    table.labels[:] = [rng.choice([0, 1, 2, 3]) if rng.random() < wrong else 1 for _ in table.labels]
    if rng.random() < 0.5:  # an attack: all labels are free but those in the row of one mask
        row = masks.unions.index[rng.randrange(len(masks))]
        free = [rng.choice([0, 2]) for _ in table.labels]
        table.labels[:] = [y if u in row else free[u] for u, y in enumerate(table.labels)]
    table.margins[:] = [rng.random() for _ in table.labels]  # which decide what is asked first
    table.confidences[:] = [rng.randint(2, 8) / 8 for _ in table.labels]
    return table


def run(flow: Callable[[LabelTable], LabelFlow[R]], full: LabelTable) -> R:
    """What a flow answers that starts with an empty table, and is told the labels that it asks for and no others."""
    table = LabelTable(full.mask_set, LabelTable(full.coarse.mask_set) if full.coarse else None)
    going = flow(table)
    while True:
        try:
            wanted, unions = next(going)
        except StopIteration as end:
            answer: R = end.value
            return answer
        answers = full if wanted is table else full.coarse
        for name in ("labels", "margins", "confidences"):
            getattr(wanted, name)[unions] = getattr(answers, name)[unions]


@cache
def settings() -> list[tuple[MaskSet, Threat, list[LabelTable]]]:
    rng, drawn = random.Random(0), []
    while len(drawn) < MASK_SETS:
        image = (rng.randint(2, 7), rng.randint(2, 7))
        threat = random_threat(rng, image)
        masks = random_masks(rng, threat, image)
        if len(masks) <= 12:
            drawn.append((masks, threat, [random_table(rng, masks) for _ in range(TABLES)]))
    return drawn


def rows_of(table: LabelTable) -> list[list[int]]:
    return [table.row_labels(i) for i in range(len(table.mask_set))]


def answers(folder: Path, modules: str, function: str, inputs: Sequence[str]) -> list[Any]:
    """What Coq computes for each input, many in one command."""
    parts = [inputs[start : start + 100] for start in range(0, len(inputs), 100)]
    lists = compute(folder, modules, [f"map ({function}) [{'; '.join(part)}]" for part in parts])
    return [value for values in lists for value in values]


def option(value: int | None) -> tuple[int] | None:
    return None if value is None else (value,)


def test_double_masking_is_the_proved_algorithm(compiled: Path) -> None:
    function = """fun '(labels, rows) =>
      let v := double_masking majority_label (seq 0 (length labels)) labels (fun i => nth i rows []) in
      (answer v, match which v with Agreed => 0 | Disagreer => 1 | Majority => 2 end, disagreers v, deciding_mask v,
       majority_label labels)"""
    inputs, expected = [], []
    for table in (table for _, _, tables in settings() for table in tables):
        labels = table.one_mask_labels()
        inputs.append(coq((labels, rows_of(table))))
        v = run(double_masking_flow, table)
        case, deciding = CASES[v.case], option(v.deciding_mask)
        expected.append((v.label, case, list(v.disagreers), deciding, majority_label(labels)))
    assert answers(compiled, "DoubleMasking", function, inputs) == expected
    assert {case for _, case, *_ in expected} == {0, 1, 2}


def test_challenger_masking_is_the_proved_algorithm(compiled: Path) -> None:
    function = """fun '(order, labels, rows) =>
      challenger_masking order labels (fun i j => nth j (nth i rows []) 0)"""
    inputs, expected = [], []
    for number, table in enumerate(table for _, _, tables in settings() for table in tables):
        labels, order = table.one_mask_labels(), list(range(len(table.mask_set)))
        seed = number if number % 2 else None
        if seed is not None:
            random.Random(seed).shuffle(order)
        inputs.append(coq((order, labels, rows_of(table))))
        verdict = challenger_masking(labels, table.pair_label, seed=seed)
        assert run(partial(challenger_flow, seed=seed), table).label == verdict.label
        expected.append((verdict.label, verdict.classifications - len(labels)))
    assert answers(compiled, "ChallengerMasking", function, inputs) == expected
    assert max(rounds for _, rounds in expected) > 2


def coarse_settings() -> list[tuple[MaskSet, Threat, list[LabelTable]]]:
    """Sets that cover, with another set that covers as their coarse masks."""
    drawn = []
    rng = random.Random(1)
    for masks, threat, tables in settings():
        coarse = MaskSet.build(threat, image=masks.image, masks=2)
        if masks.covers(threat) and len(coarse) <= 12:
            with_coarse = [copy.copy(table) for table in tables]
            for table in with_coarse:
                table.coarse = random_table(rng, coarse)
            drawn.append((masks, threat, with_coarse))
    return drawn


def test_a_coarse_round_is_the_proved_one(compiled: Path) -> None:
    """The answer, and whether the image is certified."""
    function = """fun '(masks, shapes, room, patches, tables) => map (fun '(coarse, labels, rows) =>
      let fine := double_masking majority_label (seq 0 (length labels)) labels (fun i => nth i rows []) in
      (coarse_first coarse (answer fine), check masks shapes room patches (right_masks 1 coarse))) tables"""
    inputs, expected = [], []
    for _, threat, tables in coarse_settings():
        coarse_masks = tables[0].coarse.mask_set
        shapes, room = coq(threat.shapes(coarse_masks.image)), window(threat.room(coarse_masks.image))
        mask_list = f"[{'; '.join(map(windows, coarse_masks.masks))}]"
        labels = coq([(t.coarse.one_mask_labels(), t.one_mask_labels(), rows_of(t)) for t in tables])
        inputs.append(f"({mask_list}, {shapes}, {room}, {threat.count}, {labels})")
        expected.append([coarse_answers(table, threat) for table in tables])
    outcomes = answers(compiled, "DoubleMasking Geometry Cover Certificate CoarseFirst", function, inputs)
    pairs = [pair for proved, ours in zip(outcomes, expected, strict=True) for pair in zip(proved, ours, strict=True)]
    assert all(answer == label for (answer, _), (label, *_) in pairs)
    assert all((coarse and fine) == certified for (_, coarse), (_, certified, fine) in pairs)
    assert {(coarse, fine) for (_, coarse), (*_, fine) in pairs} == set(product([True, False], repeat=2))


def coarse_answers(table: LabelTable, threat: Threat) -> tuple[int, bool, bool]:
    """The answer, the row certificate, and the row certificate of the fine masks alone."""
    label = run(partial(coarse_first_flow, fine=double_masking_flow), table).label
    certificate = run(lambda empty: certification_flow(empty, 1, threat, maps=False), table)
    fine = copy.copy(table)
    fine.coarse = None  # what the fine masks alone certify
    return label, certificate.row_certified, certificate_of(fine, threat)[1]


def test_the_certificate_is_the_proved_one(compiled: Path) -> None:
    """Whether the set covers, and both certificates of some images."""
    function = """fun '(masks, shapes, room, patches, tables) =>
      let check := check masks shapes room patches in
      (check (all_masks masks), map (fun rows => (certified 1 rows, check (good_masks 1 rows))) tables)"""
    inputs, expected = [], []
    for masks, threat, tables in settings():
        mask_list = f"[{'; '.join(map(windows, masks.masks))}]"
        shapes, room = coq(threat.shapes(masks.image)), window(threat.room(masks.image))
        rows = coq([rows_of(table) for table in tables])
        inputs.append(f"({mask_list}, {shapes}, {room}, {threat.count}, {rows})")
        expected.append((masks.covers(threat), [certificate_of(table, threat) for table in tables]))
    assert answers(compiled, "DoubleMasking Geometry Cover Certificate", function, inputs) == expected
    kinds = [(covers, *c) for covers, certificates in expected for c in certificates]
    assert min(kinds.count(kind) for kind in set(kinds)) > 20
    assert {(True, True, True), (True, False, True), (True, False, False), (False, False, False)} <= set(kinds)


def certificate_of(table: LabelTable, threat: Threat) -> tuple[bool, bool]:
    """Of certification_flow; for a set that does not cover, which it refuses, of the check alone."""
    if not table.mask_set.covers(threat):
        good = np.array([all(label == 1 for label in row) for row in rows_of(table)])
        return bool(good.all()), table.mask_set.cover(threat).hole(good) is None
    certificate = run(lambda empty: certification_flow(empty, 1, threat, maps=False), table)
    return certificate.certified, certificate.row_certified


def test_detection_is_the_proved_algorithm(compiled: Path) -> None:
    function = """fun '(threshold, undefended, answers) =>
      let confident := Nat.ltb threshold in
      (reporters confident undefended answers, alert confident undefended answers, first_failure confident 1 answers,
       detection_certified confident 1 undefended answers)"""
    rng = random.Random(1)
    inputs, expected = [], []
    for table in (table for _, _, tables in settings() for table in tables):
        labels, undefended, threshold = table.one_mask_labels(), int(table.labels[UNMASKED]), rng.randint(1, 6)
        eighths = [int(8 * confidence) for confidence in table.confidences[: len(labels)]]
        inputs.append(coq((threshold, undefended, list(zip(labels, eighths, strict=True)))))
        verdict = run(partial(detection_flow, threshold=threshold / 8), table)
        certificate = run(partial(detection_certification_flow, label=1, threshold=threshold / 8), table)
        failing = option(certificate.failing_mask)
        expected.append((list(verdict.reporters), verdict.alert, failing, certificate.detection_certified))
    assert answers(compiled, "MinorityReports", function, inputs) == expected
    assert {(alert, certified) for _, alert, _, certified in expected} == {(True, False), (False, True), (False, False)}


def test_masks_along_an_axis_are_the_proved_ones(compiled: Path) -> None:
    function = "fun '(i, p, n) => (axis_starts i p n, axis_length i p n, axis_stride i p n)"
    sizes = [(image, patch, n) for image in range(1, 15) for patch in range(1, image + 1) for n in range(1, 7)]
    expected = [(*axis_starts(i, p, n), axis_stride(i, p, n)) for i, p, n in sizes]
    assert answers(compiled, "MaskSets", function, [coq(size) for size in sizes]) == expected


def test_the_shapes_of_an_area_are_the_proved_ones(compiled: Path) -> None:
    rooms = [(area, (h, w)) for area in range(1, 26) for h in range(1, 7) for w in range(1, 7)]
    expected = [AnyRectangle(area).shapes(room, room) for area, room in rooms]
    assert (
        answers(compiled, "MaskSets", "fun '(area, room) => area_shapes area room", list(map(coq, rooms))) == expected
    )


def test_mask_sets_are_the_proved_ones(compiled: Path) -> None:
    function = """fun '(patches, room, s, strides) =>
      map (fun mask => map (fun w => (top w, left w, height w, width w)) (canonical mask))
        (combinations patches (nodup window_eq_dec (grid room s strides)))"""
    rng = random.Random(2)
    inputs, expected = [], []
    for _ in range(300):
        image = (rng.randint(3, 9), rng.randint(3, 9))
        region = random_window(rng, image) if rng.random() < 0.5 else None
        room = region or Window(0, 0, *image)
        shape = rng.randint(1, min(3, room.height)), rng.randint(1, min(3, room.width))
        strides, patches = (rng.randint(2, 4), rng.randint(2, 4)), rng.choice([1, 2])
        threat = Threat.rectangle(*shape, count=patches, region=region)
        masks = MaskSet.build(threat, image=image, stride=strides)
        inputs.append(f"({patches}, {window(room)}, {coq(shape)}, {coq(strides)})")
        expected.append({frozenset(w.numbers for w in mask) for mask in masks.masks})
    computed = answers(compiled, "Geometry MaskSets", function, inputs)
    assert [{frozenset(mask) for mask in masks} for masks in computed] == expected


def test_families_of_masks_are_the_proved_ones(compiled: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The program's shapes are those of runs of neighbouring shapes, and its masks are their grids."""
    rng = random.Random(4)
    inputs, expected = [], []
    families: list[list[MaskGrid]] = []

    def recorded(shapes: Sequence[Size], room: Size, largest: float) -> list[MaskGrid]:
        families.append(covering_family(shapes, room, largest))
        return families[-1]

    monkeypatch.setattr(mask_sets, "covering_family", recorded)
    for _ in range(200):
        image, area = (rng.randint(3, 12), rng.randint(3, 12)), rng.randint(1, 30)
        region = random_window(rng, image) if rng.random() < 0.3 else None
        threat = Threat.any_rectangle(area, region=region)
        masks = MaskSet.build(threat, image=image, masks=rng.randint(1, 4))
        shapes, runs = threat.shapes(image), []
        for grid in families[-1]:
            end = [height for height, _ in shapes].index(grid.shape[0]) + 1  # the last shape of a run is its tallest
            runs.append((shapes[:end], grid.strides))
            shapes = shapes[end:]
        inputs.append(f"({window(threat.room(image))}, {coq(runs)})")
        windows = {w.numbers for mask in masks.masks for w in mask}
        expected.append((threat.shapes(image), [grid.shape for grid in families[-1]], windows))
    function = """fun '(room, runs) => (concat (map fst runs), map run_shape (map fst runs),
      map (fun w => (top w, left w, height w, width w))
        (flat_map (fun '(run, strides) => grid room (run_shape run) strides) runs))"""
    computed = answers(compiled, "Geometry MaskSets", function, inputs)
    assert [(shapes, of_runs, set(masks)) for shapes, of_runs, masks in computed] == expected
    assert max(len(of_runs) for _, of_runs, _ in expected) > 2


def test_windows_inside_others_are_left_out_as_proved(compiled: Path) -> None:
    function = "fun mask => map (fun w => (top w, left w, height w, width w)) (canonical mask)"
    rng = random.Random(3)
    masks = [tuple(random_window(rng, (6, 6)) for _ in range(rng.randint(1, 5))) for _ in range(500)]
    expected = [{w.numbers for w in MaskSet((6, 6), (mask,)).masks[0]} for mask in masks]
    assert [set(mask) for mask in answers(compiled, "Geometry", function, list(map(windows, masks)))] == expected


def random_scores(rng: random.Random) -> ImageScores:
    """Whole numbers as local scores of three classes, and what a patch reaches."""
    size = (rng.randint(3, 6), rng.randint(3, 6))
    fields = ReceptiveFields.fields(size, field=rng.randint(1, 3), jump=rng.randint(1, 2))
    threat = Threat.square(rng.randint(1, 2), count=rng.choice([1, 2, 3]))
    rows, columns = fields.grid
    numbers = [[[float(rng.randint(0, 9)) for _ in range(columns)] for _ in range(rows)] for _ in range(3)]
    scores = torch.tensor(numbers, dtype=torch.float64)
    return ImageScores(scores, scores, scores, scores.sum((1, 2)), fields.footprints(threat), threat.count, 1, size)


def test_margins_of_local_scores_are_the_proved_ones(compiled: Path) -> None:
    """At each placement of a patch, for whole numbers: the summed margin, and PatchGuard's scores and margin."""
    function = """fun '(drop, num, others, classes, reaches) =>
      let of {A} (nothing : A) l := fun p => nth p l nothing in
      let placements := map (of false) reaches in
      let positions := seq 0 (length (hd [] classes)) in
      match map (of 0%Z) classes with [] => ([], [], []) | y :: rivals =>
        (map (fun reach => map (fun c =>
           margin_of_the_program positions drop (fun p => y p - c p)%Z placements others reach) rivals) placements,
         map (class_score positions placements num 2) (y :: rivals),
         map (fun w => map (fun c => patchguard_margin positions placements num 2 y c w) rivals) placements) end"""
    rng = random.Random(5)
    inputs, expected = [], []
    for _ in range(300):
        image, drop, num = random_scores(rng), rng.randint(9, 12), rng.choice([0, 1])
        (footprint,) = image.footprints
        reaches = [np.outer(row, column).ravel().tolist() for row in footprint.rows for column in footprint.columns]
        classes = coq(image.scores.long().flatten(1).tolist())
        inputs.append(f"({drop}%Z, {num}%Z, {image.patches - 1}, {classes}%Z, {coq(reaches)})")
        guard = PatchGuard.__new__(PatchGuard)
        guard.ratio = num / 2
        margins = guard.worst_case_margin(image, 0, footprint) * (2 - num)
        expected.append(
            (
                summed_margin(image, 0, footprint, max_drop=drop).flatten().tolist(),
                guard.class_scores(image).tolist(),
                margins.flatten().tolist(),
            )
        )
    computed = answers(compiled, "LocalScores", function, inputs)
    assert [(list(map(min, sums)), scores, list(map(min, rests))) for sums, scores, rests in computed] == expected
