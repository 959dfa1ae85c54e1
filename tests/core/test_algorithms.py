"""The algorithms over label tables, and that live and stored labels decide alike."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from patchcleanser import CallableClassifier, Case, ChallengerMasking, DoubleMasking, MaskSet, MinorityReports, Threat
from patchcleanser.core.algorithms import (
    AHEAD,
    certification_flow,
    challenger_flow,
    challenger_masking,
    double_masking,
    majority_label,
)
from patchcleanser.core.geometry import Size
from patchcleanser.core.label_table import LabelTable
from patchcleanser.core.results import Verdict
from patchcleanser.errors import CoverError


def table_of(rows: list[list[int]]) -> tuple[list[int], list[list[int]]]:
    return [rows[i][i] for i in range(len(rows))], rows


@pytest.mark.parametrize(
    ("rows", "label", "case", "mask"),
    [
        ([[1, 1, 1], [1, 1, 1], [1, 1, 1]], 1, Case.AGREED, None),
        # A unanimous disagreer wins against the majority.
        ([[5, 5, 2], [5, 5, 2], [2, 2, 2]], 2, Case.DISAGREER, 2),
        # A disagreer whose row is not unanimous does not.
        ([[5, 5, 5], [5, 5, 2], [5, 2, 2]], 5, Case.MAJORITY, None),
        # The first unanimous disagreer in mask order decides.
        ([[3, 3, 3], [3, 1, 1], [3, 1, 1]], 3, Case.DISAGREER, 0),
        # A tie goes to the largest label: 4 is the majority and 1 the disagreer.
        ([[1, 1], [1, 4]], 1, Case.DISAGREER, 0),
        ([[1, 9], [9, 4]], 4, Case.MAJORITY, None),
    ],
)
def test_double_masking_cases(rows: list[list[int]], label: int, case: Case, mask: int | None) -> None:
    labels, rows_of = table_of(rows)
    verdict = double_masking(labels, lambda i: rows_of[i])
    assert (verdict.label, verdict.case, verdict.deciding_mask) == (label, case, mask)


def test_second_rounds_are_asked_for_disagreers_only() -> None:
    requested = []

    def rows_of(i: int) -> list[int]:
        requested.append(i)
        return [7] * 4

    verdict = double_masking([5, 2, 5, 2], rows_of)
    assert requested == [1, 3] or requested == [0, 2]
    assert verdict.classifications == 4 + 3 + 2  # two rows of four, a shared pair and the diagonal known


@pytest.mark.parametrize(
    ("rows", "label", "rounds"),
    [
        ([[1, 1], [1, 1]], 1, 0),
        # Mask 1 challenges mask 0 and wins; mask 2 has the same label, so no one is left.
        ([[5, 2, 2], [2, 2, 2], [2, 2, 2]], 2, 1),
        # It loses, and so does mask 2.
        ([[5, 5, 5], [5, 2, 2], [5, 2, 2]], 5, 2),
        # A label that is neither's counts as a lost challenge.
        ([[5, 9], [9, 2]], 5, 1),
        # Mask 1 wins against 0, then 2 wins against 1: lowest remaining challenger first.
        ([[5, 2, 0], [2, 2, 3], [0, 3, 3]], 3, 2),
    ],
)
def test_challenger_rounds(rows: list[list[int]], label: int, rounds: int) -> None:
    labels, rows_of = table_of(rows)
    verdict = challenger_masking(labels, lambda i, j: rows_of[i][j])
    assert (verdict.label, verdict.classifications) == (label, len(labels) + rounds)


@pytest.mark.parametrize("labels", [2, 5])
def test_a_flow_of_challenger_masking_computes_few_labels_that_no_round_needs(labels: int) -> None:
    rng, masks = np.random.default_rng(labels), MaskSet.build(Threat.square(1), image=(12, 12), masks=4)
    size, costs = len(masks), []
    for wrong in np.linspace(0, 1, 200):
        full = np.where(rng.random(len(masks.unions)) < wrong, rng.integers(1, labels, len(masks.unions)), 0)
        table = LabelTable(masks)
        for _, unions in challenger_flow(table):
            table.labels[unions] = full[unions]
        verdict = challenger_masking(full[:size].tolist(), lambda i, j, full=full: int(full[masks.unions.index[i, j]]))
        rounds = verdict.classifications - size
        assert size + rounds <= table.spent <= size + AHEAD * rounds
        costs.append((table.spent - size, rounds))
    spent, rounds = np.sum(costs, axis=0)
    assert rounds < spent < 3 * rounds


def test_a_seed_gives_another_but_repeatable_order() -> None:
    rng = np.random.default_rng(0)
    differ = 0
    for _ in range(50):
        rows = rng.integers(0, 3, (6, 6))
        labels = [int(rows[i, i]) for i in range(6)]
        answers = [
            challenger_masking(labels, lambda i, j, rows=rows: int(rows[min(i, j), max(i, j)]), seed=s).label
            for s in (None, 1, 1)
        ]
        assert answers[1] == answers[2]
        differ += answers[0] != answers[1]
    assert differ > 5


@given(st.lists(st.integers(0, 4), min_size=1, max_size=30))
def test_majority_is_the_most_frequent_and_then_the_largest(labels: list[int]) -> None:
    best = majority_label(labels)
    assert all((labels.count(best), best) >= (labels.count(other), other) for other in labels)


# A classifier that recognises the union by what is hidden, and answers from a stored table.

IMAGE: Size = (5, 7)
THREAT = Threat.square(2)


def classifier_of(masks: MaskSet, labels: list[int]) -> CallableClassifier:
    """On an all-ones image with black masks: label u under union u, the last one unmasked."""
    patterns = np.concatenate([MaskSet(masks.image, masks.unions.masks).visible(), np.ones((1, *masks.image), bool)])
    keys = {pattern.tobytes(): label for pattern, label in zip(patterns, labels, strict=True)}

    def logits(images: Tensor) -> Tensor:
        answers = [keys[image.bool().all(0).numpy().tobytes()] for image in images]
        # A margin of its own for every label, so that the order of early exit is shuffled.
        return torch.nn.functional.one_hot(torch.tensor(answers), 4) * (
            1.0 + torch.tensor([[hash(str(f)) % 7] for f in answers])
        )

    return CallableClassifier(logits, array="torch", classes=4)


def setting(count: int, masks: int) -> MaskSet:
    threat = THREAT if count == 1 else Threat.square(2, count=count)
    return MaskSet.build(threat, image=IMAGE, masks=masks)


@st.composite
def tables(draw: st.DrawFn) -> tuple[MaskSet, int, list[int]]:
    count = draw(st.sampled_from([1, 1, 2]))
    masks = setting(count, draw(st.integers(1, 3)) if count == 1 else 2)
    common = draw(st.sampled_from([0, 3]))
    odd = draw(st.sampled_from([0, 1, 3, 50]))
    labels = [common] * (len(masks.unions) + 1)
    for _ in range(odd):
        labels[draw(st.integers(0, len(labels) - 1))] = draw(st.integers(0, 3))
    return masks, count, labels


def stored(masks: MaskSet, labels: list[int]) -> LabelTable:
    table = LabelTable(masks)
    table.labels[:] = labels
    return table


@settings(max_examples=150, deadline=None)
@given(tables())
def test_live_and_stored_labels_give_the_same_verdict(case: tuple[MaskSet, int, list[int]]) -> None:
    masks, count, labels = case
    threat = Threat.square(2, count=count)
    table, image = stored(masks, labels), torch.ones(1, 3, *IMAGE)
    model = classifier_of(masks, labels)
    model.preprocessing = type(model.preprocessing)(fill=(0.0,))

    def decided(v: Verdict) -> tuple[object, ...]:
        return v.label, v.case, v.one_mask_labels, v.disagreers, v.deciding_mask

    (live,) = DoubleMasking(model, threat, mask_set=masks).predict(image)
    assert decided(live) == decided(double_masking(table.one_mask_labels(), table.row_labels))
    (live,) = ChallengerMasking(model, threat, mask_set=masks).predict(image)
    assert decided(live) == decided(challenger_masking(table.one_mask_labels(), table.pair_label))
    (report,) = MinorityReports(model, threat, mask_set=masks, threshold=0).predict(image)
    assert report.alert == (set(table.one_mask_labels()) != {labels[-1]})


@settings(max_examples=150, deadline=None)
@given(tables(), st.integers(0, 3))
def test_early_exit_gives_the_same_answer_as_the_full_check(case: tuple[MaskSet, int, list[int]], truth: int) -> None:
    masks, count, labels = case
    threat = Threat.square(2, count=count)
    model = classifier_of(masks, labels)
    model.preprocessing = type(model.preprocessing)(fill=(0.0,))
    defense = DoubleMasking(model, threat, mask_set=masks)
    image = torch.ones(1, 3, *IMAGE)
    (early,), (full,) = defense.certify(image, [truth]), defense.certify(image, [truth], maps=True)
    assert full.certified == all(label == truth for label in labels[:-1])
    assert (early.certified, early.row_certified) == (full.certified, full.row_certified)
    assert early.classifications <= full.classifications == len(masks.unions)
    if not full.certified:
        assert full.failing_pair is not None
        assert labels[masks.unions.index[full.failing_pair]] != truth
    assert full.positions is not None
    everywhere = all(grid.all() for grid in full.positions.values())
    if count == 1:
        assert full.row_certified == everywhere
    if full.failing_placement is not None:
        place = full.failing_placement[0]
        assert not full.positions[place.height, place.width][place.top, place.left]


@pytest.mark.parametrize("careless", ["fine", "coarse"])
def test_no_certificate_comes_from_masks_or_coarse_masks_that_do_not_cover(careless: str) -> None:
    threat = Threat.square(2)
    covering, small = (
        MaskSet.build(threat, image=(8, 8), masks=2),
        MaskSet.build(Threat.square(1), image=(8, 8), masks=3),
    )
    table = LabelTable(
        small if careless == "fine" else covering, LabelTable(small if careless == "coarse" else covering)
    )
    for part in (table, table.coarse):
        assert part is not None
        part.labels[:], part.margins[:] = 0, 1.0
    with pytest.raises(CoverError, match="does not cover the threat"):
        list(certification_flow(table, 0, threat, maps=False))
