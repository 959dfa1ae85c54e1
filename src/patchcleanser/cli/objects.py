"""patchcleanser certify --task detect: certify the objects of images, each by itself."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from patchcleanser.cli.progress import LOGGER
from patchcleanser.cli.tasks import CertifyTask
from patchcleanser.core.counts import counted
from patchcleanser.core.threats import Threat
from patchcleanser.errors import InputError

if TYPE_CHECKING:
    from patchcleanser.evaluation.detect_jobs import DetectJob
    from patchcleanser.records.metrics import Summary
    from patchcleanser.records.run import Run

SETTINGS = ("score", "masked_score", "prune")
"""What --option may set."""


class DetectTask(CertifyTask):
    """Objects with boxes: the share of them that stays in sight, against each patch of --patch."""

    name = "detect"
    refused = (
        *("patches", "grid", "defense", "coarse", "threshold", "precision", "split", "labels"),
        *("table", "confirm", "dry-run", "on"),
    )
    timed = False

    def jobs(self) -> list[DetectJob]:
        from patchcleanser.data.object_sets import load_objects
        from patchcleanser.detectors import load_detector
        from patchcleanser.evaluation.detect_jobs import DetectJob

        options = self.options
        detector = load_detector(options.model, device=options.device)
        objects = load_objects(options.data, root=options.root)
        dataset, missing = objects.renumbered(detector.classes)
        dataset = dataset.chosen(options.limit, seed=options.seed, subset=options.subset)
        if missing:
            LOGGER.info(f"objects of {counted(len(missing), 'class')} are left out: {', '.join(missing[:5])}")
        sides = options.mask_set_options
        patches = [Threat.parse(patch) for patch in dict.fromkeys(options.patch.split(","))]
        job = DetectJob(detector, dataset, patches[0], sides["masks"], sides["stride"], self.lines, spec=options.model)
        job = replace(job, **self._thresholds())  # type: ignore[arg-type]  # numbers only
        return [replace(job, threat=patch) for patch in patches]

    def _thresholds(self) -> dict[str, float]:
        values = {}
        for text in self.texts:
            name, equals, value = text.partition("=")
            try:
                if not equals or name not in SETTINGS:
                    raise ValueError
                values[name] = float(value)
            except ValueError as error:
                raise InputError(f"--option takes {', '.join(SETTINGS)} as name=number, got {text!r}") from error
        return values

    @staticmethod
    def described(run: Run, result: Summary) -> Iterator[str]:
        objects = counted(result.shares["undefended"].total, "object")
        yield f"{run.threat}: {objects} in {counted(result.images, 'image')}, half of each covered"
        for name, share in result.shares.items():
            text = share.with_interval() if share.total else "   no such placement"
            yield f"{name.replace('_', ' '):20} {text}"
