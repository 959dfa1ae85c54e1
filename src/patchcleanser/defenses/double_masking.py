"""Double-masking: mask everywhere once, and look twice where the labels disagree."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

from patchcleanser.core.tables import LabelTable
from patchcleanser.core.verdicts import Case, Certificate, Verdict
from patchcleanser.defenses.base import Game, MaskDefense
from patchcleanser.defenses.two_mask import certification


def majority_label(labels: Sequence[int]) -> int:
    """The most frequent label; of several, the largest.

    The authors' code sorts label counts with an unstable sort, so that it may choose another of several. No
    certificate depends on the choice: see two_mask.certification.

    >>> majority_label([3, 1, 1, 3, 2])
    3
    """
    counts = Counter(labels)
    return max(counts, key=lambda label: (counts[label], label))


def double_masking(one: Sequence[int], two: Callable[[int], Sequence[int]]) -> Verdict:
    """Algorithm 1: `one[i]` is the label under mask i, `two(i)[j]` under masks i and j.

    `two` is called for disagreers only, in order, until one is unanimous. The proof that a
    certified image keeps its label stands in two_mask.certification.

    >>> double_masking([7, 7, 4], lambda i: [4, 4, 4]).case
    <Case.DISAGREER: 'disagreer'>
    """
    majority = majority_label(one)
    disagreers = tuple(i for i, label in enumerate(one) if label != majority)
    verdict = Verdict(
        label=majority,
        case=Case.MAJORITY if disagreers else Case.AGREED,
        one_mask_labels=tuple(one),
        disagreers=disagreers,
        deciding_mask=None,
        classifications=len(one),
    )
    asked: set[frozenset[int]] = set()
    for i in disagreers:
        # The diagonal is the one-mask label, and two masks commute.
        asked |= {frozenset((i, j)) for j in range(len(one)) if j != i}
        if all(label == one[i] for label in two(i)):
            verdict = replace(verdict, label=one[i], case=Case.DISAGREER, deciding_mask=i)
            break
    return replace(verdict, classifications=len(one) + len(asked))


class DoubleMasking(MaskDefense[Verdict, Certificate]):
    """The paper's main defense. A certified image keeps its label under every patch of the threat.

    >>> import torch
    >>> brightness = lambda x: torch.stack([x.mean((1, 2, 3)), 1 - x.mean((1, 2, 3))], 1)
    >>> from patchcleanser import CallableClassifier, Threat
    >>> model = CallableClassifier(brightness, array="torch")
    >>> defense = DoubleMasking(model, Threat.square(2), masks=4)
    >>> [c.certified for c in defense.certify(torch.ones(1, 3, 16, 16), [0])]
    [True]
    """

    def _verdict(self, table: LabelTable) -> Game[Verdict]:
        yield table.masks()
        one = table.one()
        majority = majority_label(one)
        # All second rounds at once: they are batched across masks and images.
        yield table.rows([i for i, label in enumerate(one) if label != majority])
        return replace(double_masking(one, table.row), classifications=table.spent)

    def _certificate(self, table: LabelTable, label: int, maps: bool) -> Game[Certificate]:
        return certification(table, label, self.threat, maps=maps)

    def _outcome(self, verdict: Verdict) -> int:
        return verdict.label
