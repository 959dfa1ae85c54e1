"""BagCert: every place votes yes or no for each class, and the votes are counted."""

from __future__ import annotations

from torch import Tensor

from patchcleanser.core.receptive_fields import Footprint
from patchcleanser.defenses.local_defense import LocalDefense, Scores, summed_ahead
from patchcleanser.defenses.local_scores import LocalLogits


class BagCert(LocalDefense):
    """By Metzen and Yatsura (2021). The network is trained end to end on its votes (`net:bagnet?votes=true`).

    A place votes for every class whose local logit is above 0 (a Heaviside step). The class with
    the most votes is the answer.

    Certificate and proof: for every placement of the patch and every other class c, the places that
    it does not reach give y more votes than c, by more than the number of places that it reaches. A
    reached place can take its vote from y and give it to c, a difference of at worst -1, so y keeps
    the most votes under every patch. The sums are in local.summed_ahead, with a swing of 1.
    """

    def _evidence(self) -> LocalLogits:
        return LocalLogits(self.classifier, self.threat.grid)

    def _scored(self, local: Tensor) -> Tensor:
        return (local > 0).to(local)

    def _totals(self, case: Scores) -> Tensor:
        return case.score.sum((1, 2))

    def _ahead(self, case: Scores, label: int, reach: Footprint) -> Tensor:
        return summed_ahead(case, label, reach, swing=1.0)
