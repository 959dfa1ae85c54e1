"""The definitions that were proved and the program give the same answers."""

from __future__ import annotations

import copy
import random
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch

from patchcleanser import MaskSet, Threat
from patchcleanser.core import masks as mask_sets
from patchcleanser.core.algorithms import (
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
from patchcleanser.defenses.smoothing import Smoothing
from patchcleanser.errors import CoverError
from proofs.coq import coq, needs_coq
from proofs.drawn import answers, random_table, random_window, rows_of, run, settings, window, windows

pytestmark = needs_coq

NO_CLASS = 9  # stands for UNCERTAIN, a number too large for Coq's unary ones
CASES = {Case.AGREED: 0, Case.DISAGREER: 1, Case.MAJORITY: 2}


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
                table.coarse.rounding = 0  # a pass that rounds has no coarse round
            drawn.append((masks, threat, with_coarse))
    return drawn


def test_a_coarse_round_is_the_proved_one(compiled: Path) -> None:
    """The answer, and both certificates."""
    function = """fun '(masks, shapes, room, patches, tables) => map (fun '(coarse, labels, rows) =>
      let fine := double_masking majority_label (seq 0 (length labels)) labels (fun i => nth i rows []) in
      (coarse_first coarse (answer fine), check masks shapes room patches (right_masks 1 coarse),
       unanimous 1 coarse)) tables"""
    inputs, expected = [], []
    for _, threat, tables in coarse_settings():
        coarse_masks = tables[0].coarse.mask_set
        shapes, room = coq(threat.shapes(coarse_masks.image)), window(threat.room(coarse_masks.image))
        mask_list = f"[{'; '.join(map(windows, coarse_masks.masks))}]"
        if len(coarse_masks) > 1 and not (part := MaskSet(coarse_masks.image, coarse_masks.masks[1:])).covers(threat):
            table = copy.copy(tables[0])
            table.coarse = LabelTable(part)
            with pytest.raises(CoverError):
                certificate_of(table, threat)
        labels = coq([(t.coarse.one_mask_labels(), t.one_mask_labels(), rows_of(t)) for t in tables])
        inputs.append(f"({mask_list}, {shapes}, {room}, {threat.count}, {labels})")
        expected.append([coarse_answers(table, threat) for table in tables])
    outcomes = answers(compiled, "DoubleMasking Geometry Cover Certificate CoarseFirst", function, inputs)
    pairs = [pair for proved, ours in zip(outcomes, expected, strict=True) for pair in zip(proved, ours, strict=True)]
    for (answer, rows, right), (label, certificate, fine) in pairs:
        assert label == answer
        assert certificate == (fine[0] and right, fine[1] and rows)
    assert {(rows, fine[1]) for (_, rows, _), (*_, fine) in pairs} == set(product([True, False], repeat=2))


def coarse_answers(table: LabelTable, threat: Threat) -> tuple[int, tuple[bool, bool], tuple[bool, bool]]:
    """The answer, both certificates, and those of the fine masks alone."""
    label = run(partial(coarse_first_flow, fine=double_masking_flow), table).label
    fine = copy.copy(table)
    fine.coarse = None
    return label, certificate_of(table, threat), certificate_of(fine, threat)


def test_the_certificate_is_the_proved_one(compiled: Path) -> None:
    """Whether the set covers, and both certificates of some images, of which some labels are uncertain."""
    function = f"""fun '(masks, shapes, room, patches, tables) =>
      let check := check masks shapes room patches in
      (check (all_masks masks), map (fun '(rounding, rows) =>
        let certain '(y, margin) := certain_label {NO_CLASS} (Z.of_nat rounding) (Z.of_nat margin) y in
        let rows := map (map certain) rows in (certified 1 rows, check (good_masks 1 rows))) tables)"""
    inputs, expected = [], []
    for masks, threat, tables in settings():
        mask_list = f"[{'; '.join(map(windows, masks.masks))}]"
        shapes, room = coq(threat.shapes(masks.image)), window(threat.room(masks.image))
        rows = coq([(int(8 * table.rounding), rows_with_margins(table)) for table in tables])
        inputs.append(f"({mask_list}, {shapes}, {room}, {threat.count}, {rows})")
        expected.append((masks.covers(threat), [certificate_of(table, threat) for table in tables]))
    assert answers(compiled, "DoubleMasking Geometry Cover Certificate OnePass", function, inputs) == expected
    kinds = [(covers, *c) for covers, certificates in expected for c in certificates]
    assert min(kinds.count(kind) for kind in set(kinds)) > 20
    assert {(True, True, True), (True, False, True), (True, False, False), (False, False, False)} <= set(kinds)


def rows_with_margins(table: LabelTable) -> list[list[tuple[int, int]]]:
    """Each label with its margin in eighths."""
    pairs = list(zip(table.labels.tolist(), (8 * table.margins).astype(int).tolist(), strict=True))
    return [[pairs[union] for union in row] for row in table.mask_set.unions.index]


def certificate_of(table: LabelTable, threat: Threat) -> tuple[bool, bool]:
    """Of certification_flow; for a set that does not cover, which it refuses, of the check alone."""
    if not table.mask_set.covers(threat):
        with pytest.raises(CoverError):
            run(lambda empty: certification_flow(empty, 1, threat, maps=False), table)
        good = (table.certain_labels[table.mask_set.unions.index] == 1).all(axis=1)
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


def test_margins_of_smoothing_are_the_proved_ones(compiled: Path) -> None:
    function = """fun '(classes, most, y) =>
      let ballot := fun c v => nth v (nth c classes []) false in
      map (smoothing_margin (seq 0 (length (hd [] classes))) ballot most y)
        (filter (fun c => negb (Nat.eqb c y)) (seq 0 (length classes)))"""
    rng = random.Random(6)
    inputs, expected = [], []
    for _ in range(300):
        image, label = random_scores(rng), rng.randrange(3)
        votes = (image.scores >= rng.randint(1, 5)).double()
        votes[label] = torch.maximum(votes[label], votes[(label + 1) % 3])
        image = replace(image, scores=votes, low=votes, high=votes)
        (footprint,) = image.footprints
        inputs.append(f"({coq(votes.bool().flatten(1).tolist())}, {image.patches * footprint.max_scores}%Z, {label})")
        expected.append(Smoothing.__new__(Smoothing).worst_case_margin(image, label, footprint).item())
    assert list(map(min, answers(compiled, "LocalScores", function, inputs))) == expected
