"""BagCert: every position votes yes or no for each class, and the votes are counted."""

from __future__ import annotations

from torch import Tensor

from patchcleanser.core.receptive_fields import Footprint
from patchcleanser.defenses.local_defense import ImageScores, LocalRecovery, summed_margin


class BagCert(LocalRecovery):
    """By Metzen and Yatsura (2021). The network is trained end to end on its votes (`net:bagnet?votes=true`).

    A position votes for every class whose local logit is above 0 (a Heaviside step). The class with the most votes
    is the answer.

    Certificate and proof: for every placement of the patch and every other class c, the positions that it does not
    reach give y more votes than c, by more than the number of positions that it reaches. A reached position can take
    its vote from y and give it to c, a difference of at worst -1, so y keeps the most votes under every patch. The
    sums are in local_defense.summed_margin, with a max_drop of 1. Checked by Coq: proofs/LocalScores.v:
    summed_margin_is_a_lower_bound.
    """

    def transform_scores(self, scores: Tensor) -> Tensor:
        return (scores > 0).to(scores)

    def worst_case_margin(self, image: ImageScores, label: int, footprint: Footprint) -> Tensor:
        return summed_margin(image, label, footprint, max_drop=1.0)
