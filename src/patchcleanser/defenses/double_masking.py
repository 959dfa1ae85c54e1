"""Double-masking: mask everywhere once, and look twice where the labels disagree."""

from __future__ import annotations

from patchcleanser.core.algorithms import LabelFlow, double_masking_flow
from patchcleanser.core.label_table import LabelTable
from patchcleanser.core.results import Verdict
from patchcleanser.defenses.recovery_masking import RecoveryMasking


class DoubleMasking(RecoveryMasking):
    """The paper's main defense. A certified image keeps its label under every patch of the threat.

    The proof is in core.algorithms.certification_flow (proofs/DoubleMasking.v: double_masking_keeps_the_label).

    >>> import torch
    >>> brightness = lambda x: torch.stack([x.mean((1, 2, 3)), 1 - x.mean((1, 2, 3))], 1)
    >>> from patchcleanser import CallableClassifier, Threat
    >>> model = CallableClassifier(brightness, array="torch")
    >>> defense = DoubleMasking(model, Threat.square(2), masks=4)
    >>> [c.certified for c in defense.certify(torch.ones(1, 3, 16, 16), [0])]
    [True]
    """

    def _fine_flow(self, table: LabelTable) -> LabelFlow[Verdict]:
        return double_masking_flow(table)
