"""Label-free hardening: a copy of a finished classifier whose labels survive masks.

Nobody needs the training set for this. The copy learns to say of a masked photo what the
untouched classifier says of the unmasked one. No labels are used, the original is not changed,
and batch-norm statistics stay as they were. Photos are few, and a copy could learn their answers by
heart; so it sees crops of them, recoloured and blended with each other, and the original is asked
about every such picture anew.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from patchcleanser.classifiers.torch import TorchClassifier
from patchcleanser.core.threats import Threat
from patchcleanser.data.dataset import Dataset
from patchcleanser.errors import InputError
from patchcleanser.training.checkpoints import Checkpoint
from patchcleanser.training.choice import Check, chosen
from patchcleanser.training.settings import HardenSettings
from patchcleanser.training.student import Student, Watcher

FORMAT = 3
"""Of checkpoints; one of another format, or of photos drawn another way, is not gone on with."""


@dataclass
class Hardened:
    """The hardened copy, and how it got there; the first check is of the untouched classifier."""

    classifier: TorchClassifier
    checks: list[Check]
    best: Check


def harden(
    classifier: TorchClassifier,
    photos: Dataset,
    threat: Threat,
    *,
    settings: HardenSettings | None = None,
    seed: int = 0,
    out: Path | None = None,
    on_progress: Watcher | None = None,
) -> Hardened:
    """Fine-tune a copy of a torch classifier on unlabelled photos so that its labels survive masks.

    Stops when the invariance on held-out photos has not improved for a while. Of the copies that are not clearly
    less invariant than the most invariant one, the one that agrees most with the original is returned; among them are
    some whose weights lie between the original's and the best copy's. A checkpoint
    in `out`, if that is given, is taken up, so a killed run goes on after its last epoch or so. It is left in
    place until `write_model` has written the weights down.
    """
    settings = settings or HardenSettings()
    if len(photos) < 10:
        raise InputError(f"hardening needs at least 10 photos, got {len(photos)}")
    student = Student(classifier, photos, threat, settings, seed)
    # Their fingerprint is known once photos were read.
    checkpoint = None if out is None else Checkpoint(out, _key(classifier, photos, threat, settings, seed))
    state = None if checkpoint is None else checkpoint.read(classifier.device)
    if state is None:
        student.checked(None)
    else:
        student.restore(state)
        del state  # or its tensors would stay on the device
    while not student.over:
        student.epoch(on_progress)
        if checkpoint is not None:
            checkpoint.write(student.state, last=student.over)
    student.look_back(on_progress)
    best = chosen(student.candidates)
    student.kept.load_state_dict(student.copies.get(best.place, student.teacher.state_dict()))
    hardened = TorchClassifier(student.kept, classifier.preprocessing, classes=classifier.classes)
    return Hardened(hardened, student.checks, best)


def _key(
    classifier: TorchClassifier, photos: Dataset, threat: Threat, settings: HardenSettings, seed: int
) -> dict[str, Any]:
    """What makes one run another."""
    of = {
        "format": FORMAT,
        "classifier": classifier.fingerprint,
        "photos": photos.fingerprint,
        "patch": str(threat),
        "grid": threat.grid,
    }
    return {**of, "settings": asdict(settings), "seed": seed}
