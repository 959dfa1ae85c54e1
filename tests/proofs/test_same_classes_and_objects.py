"""Multi-label classifiers and detectors: the definitions that were proved and the program give the same answers."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np

from patchcleanser import MaskSet, Threat
from patchcleanser.core.cover import Mask
from patchcleanser.core.detections import Detections, merge, promised_coverage
from patchcleanser.core.geometry import Size
from patchcleanser.core.hiding import PLACES, certify_object, near_gap, placements
from patchcleanser.core.label_table import LabelTable
from patchcleanser.core.multilabel import MultiLabelCertificate, MultiLabelVerdict, ScoreTable, certify_classes
from patchcleanser.core.results import Case
from patchcleanser.defenses.multilabel_masking import MultiLabelMasking
from proofs.coq import coq, needs_coq
from proofs.drawn import answers, random_window, rows_of, settings, window, windows

pytestmark = needs_coq

CASES = {Case.AGREED: 0, Case.DISAGREER: 1, Case.MAJORITY: 2}
IMAGE: Size = (8, 9)
NUM, DEN = 3, 4  # what another box must cover of a box that is left out


def classes_of(rng: random.Random, tables: list[LabelTable]) -> tuple[list[bool], ScoreTable]:
    """Each table of labels as the scores of one class: right where its label is 1."""
    truth = [rng.random() < 0.6 for _ in tables]
    present = np.array([(table.labels == 1) == true for table, true in zip(tables, truth, strict=True)]).T
    scores = ScoreTable(tables[0].mask_set, np.zeros(1, dtype=np.float32))
    sizes = [[rng.choice([0, 0.5, 1]) for _ in truth] for _ in present]  # some scores equal the threshold
    scores.write(np.arange(len(present)), np.where(present, sizes, np.subtract(-0.5, sizes)).astype(np.float32))
    return truth, scores


def verdict_of(full: ScoreTable) -> MultiLabelVerdict:
    """What the flow answers if it is told the scores that it asks for and no others."""
    table = full.anew()
    flow = MultiLabelMasking.__new__(MultiLabelMasking).verdict_flow(table)
    while True:
        try:
            _, unions = next(flow)
        except StopIteration as end:
            verdict: MultiLabelVerdict = end.value
            return verdict
        table.write(unions, full.scores[unions])


def test_several_classes_are_answered_and_counted_as_proved(compiled: Path) -> None:
    function = """fun '(masks, shapes, room, patches, classes) =>
      let rows := map (fun '(truth, (labels, rows)) => (truth, rows)) classes in
      let listed := listed_placements masks shapes room patches in
      let n := length masks in
      (map (fun '(truth, (labels, rows)) =>
        let v := double_masking majority_label (seq 0 n) labels (fun i => nth i rows []) in
        (answer v, match which v with Agreed => 0 | Disagreer => 1 | Majority => 2 end)) classes,
       (fewest_true n rows listed, most_false n rows listed, map (right_everywhere n listed) rows))"""
    rng = random.Random(0)
    inputs, expected = [], []
    for masks, threat, tables in settings():
        if not masks.covers(threat):
            continue
        truth, scores = classes_of(rng, tables)
        decisions = [scores.decisions[:, c].astype(int) for c in range(len(truth))]
        classes = coq(
            [(t, (d[: len(masks)].tolist(), rows_of_labels(masks, d))) for t, d in zip(truth, decisions, strict=True)]
        )
        mask_list = f"[{'; '.join(map(windows, masks.masks))}]"
        shapes, room = coq(threat.shapes(masks.image)), window(threat.room(masks.image))
        inputs.append(f"({mask_list}, {shapes}, {room}, {threat.count}, {classes})")
        verdict = verdict_of(scores)
        answered = [(int(c in verdict.present), CASES[case]) for c, case in enumerate(verdict.cases)]
        certificate = certify_classes(scores, threat, np.array(truth))
        expected.append((answered, counts_of(certificate, len(truth))))
    computed = answers(compiled, "DoubleMasking Geometry Certificate MultiLabel", function, inputs)
    assert computed == expected
    assert len(expected) > 300
    assert {case for answered, _ in expected for _, case in answered} == {0, 1, 2}
    assert len({counts[:2] for _, counts in expected}) > 8


def rows_of_labels(masks: MaskSet, labels: np.ndarray) -> list[list[int]]:
    table = LabelTable(masks)
    table.labels[:] = labels
    return rows_of(table)


def counts_of(certificate: MultiLabelCertificate, classes: int) -> tuple[int, int, list[bool]]:
    """The fewest true positives, the most false ones, and the classes that are right everywhere."""
    wrong = {*certificate.present} - {*certificate.certified} | {*certificate.possible}
    return certificate.true_positives, certificate.false_positives, [c not in wrong for c in range(classes)]


Boxes = list[tuple[int, tuple[int, int, int, int]]]
"""Classes and windows."""

WITH_BOXES = f"""
      let pixels := list_prod (seq 0 {IMAGE[0]}) (seq 0 {IMAGE[1]}) in
      let box := fun '(k, (t, l, h, w)) => (k, in_window (Window t l h w)) in"""


def random_boxes(rng: random.Random, number: int) -> Boxes:
    return [(rng.randrange(2), random_window(rng, IMAGE).numbers) for _ in range(number)]


def detections(boxes: Boxes) -> Detections:
    corners = [(left, top, left + width, top + height) for _, (top, left, height, width) in boxes]
    return Detections(corners, [k for k, _ in boxes], np.ones(len(boxes)))


def test_boxes_are_merged_as_proved(compiled: Path) -> None:
    function = f"""fun '(base, masked) => {WITH_BOXES}
      merge (fun b c => covered pixels {NUM} {DEN} (box b) (box c)) base masked"""
    rng = random.Random(1)
    inputs, expected = [], []
    for _ in range(300):
        base, parts = random_boxes(rng, rng.randint(0, 3)), [random_boxes(rng, rng.randint(0, 4)) for _ in range(3)]
        masked = sorted((b for part in parts for b in part), key=lambda b: -b[1][2] * b[1][3])
        inputs.append(coq((base, masked)))
        answer = merge(detections(base), list(map(detections, parts)), prune=NUM / DEN)
        corners = zip(answer.classes.tolist(), answer.boxes.astype(int).tolist(), strict=True)
        expected.append([(k, (top, left, bottom - top, right - left)) for k, (left, top, right, bottom) in corners])
    computed = answers(compiled, "Geometry Objects", function, inputs)
    assert list(map(sorted, computed)) == list(map(sorted, expected))  # the program keeps the order of the masks


def test_boxes_promise_what_is_proved(compiled: Path) -> None:
    function = f"""fun '(object, parts) => {WITH_BOXES}
      promises pixels {NUM} {DEN} (box object) (map (map box) parts)"""
    rng = random.Random(2)
    inputs, expected = [], []
    for _ in range(300):
        (target,), parts = random_boxes(rng, 1), [random_boxes(rng, rng.randint(0, 4)) for _ in range(4)]
        if rng.random() < 0.5:
            parts[0].append((target[0], random_window(rng, IMAGE).numbers if rng.random() < 0.5 else target[1]))
        inputs.append(coq((target, parts)))
        objects = detections([target])
        unit = DEN * target[1][2] * target[1][3]
        shares = [promised_coverage(detections(p), objects.boxes[0], target[0], prune=NUM / DEN) for p in parts]
        assert all(abs(unit * share - round(unit * share)) < 1e-5 for share in shares)
        expected.append([round(unit * share) for share in shares])
    assert answers(compiled, "Geometry Objects", function, inputs) == expected
    assert sum(share > 0 for shares in expected for share in shares) > 100


def test_objects_are_certified_as_proved(compiled: Path) -> None:
    """For the rooms that the program finds, the least promise of each class of placements, in eighths."""
    function = """fun '(masks, promises, places) =>
      map (fun rooms => fold_right Z.min 8%Z (promises_by_placement masks rooms promises)) places"""
    rng = random.Random(3)
    inputs, expected = [], []
    for _ in range(300):
        threat = (
            Threat.any_rectangle(rng.randint(1, 6)) if rng.random() < 0.5 else Threat.rectangle(2, rng.randint(1, 3))
        )
        chosen: list[Mask] = [(random_window(rng, IMAGE),) for _ in range(4)]
        masks = MaskSet(IMAGE, (*MaskSet.build(threat, image=IMAGE, masks=2).masks, *chosen))
        promises, box = [rng.randint(0, 8) for _ in masks.masks], random_window(rng, IMAGE)
        rooms = list(placements(threat, box, IMAGE, near_gap(IMAGE)))
        places = [[f"({coq(shape)}, {window(room)})" for place, shape, room in rooms if place == p] for p in PLACES]
        mask_list = f"[{'; '.join(map(windows, masks.masks))}]"
        listed = "; ".join(f"[{'; '.join(place)}]" for place in places)
        inputs.append(f"({mask_list}, {coq(promises)}%Z, [{listed}])")
        certificate = certify_object(masks, threat, box, 0, np.array(promises) / 8)
        shares = [getattr(certificate, place) for place in PLACES]
        assert [share is None for share in shares] == [not place for place in places]
        expected.append([8 if share is None else int(8 * share) for share in shares])
    assert answers(compiled, "Geometry Objects", function, inputs) == expected
    assert {share for shares in expected for share in shares} == set(range(9))
