"""Attack CIFAR-10 images adaptively against the zoo, setting by setting in turns, and count what was fooled.

    python benchmarks/adaptive_campaign.py --minutes 120 --runs runs/campaign    # --device cuda --batch 256 on a GPU

Every setting is a run of `patchcleanser attack --attack adaptive`. The same command goes on where it stopped, until
each setting has all its images. No certified image may be fooled; the script fails if one is.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from pyarrow import compute

from patchcleanser import Threat, load_classifier, load_dataset
from patchcleanser.attacks.patch_attack import AttackSettings
from patchcleanser.data import chosen
from patchcleanser.evaluation import AttackJob, Job, evaluate
from patchcleanser.evaluation.workloads import Progress
from patchcleanser.records.metrics import certified_fooled
from patchcleanser.records.provenance import versions
from patchcleanser.records.run import Run


@dataclass(frozen=True)
class Setting:
    """One run: so many test images, at random by the seed."""

    model: str
    defense: str
    patch: int
    images: int
    patches: int = 1
    masks: int = 3
    iterations: int = 10
    locations: int = 1
    seed: int = 0

    @property
    def folder(self) -> str:
        """The name of its run."""
        return f"{self.model.partition(':')[2]}-{self.defense}-{self.patches}of{self.patch}-{self.masks}x{self.masks}"

    def job(self, device: str) -> AttackJob:
        """What is attacked, and how."""
        base = Job(
            load_classifier(self.model, device=device),
            chosen(load_dataset("cifar10"), self.images, seed=self.seed),
            Threat.square(self.patch, count=self.patches),
            defense=self.defense,
            masks=self.masks,
        )
        settings = AttackSettings(iterations=self.iterations, locations=self.locations, seed=self.seed)
        return AttackJob(base, "adaptive", settings)


LARGE = ("zoo:cifar10-vit", "zoo:cifar10-mlp", "zoo:cifar10-resnet")
SETTINGS = [
    Setting("zoo:tiny", "double-masking", 2, 10_000, masks=2),
    Setting("zoo:tiny", "double-masking", 2, 4000),
    Setting("zoo:tiny", "double-masking", 5, 4000, masks=2),
    Setting("zoo:tiny", "challenger-masking", 2, 2500, masks=2),
    Setting("zoo:tiny", "minority-reports", 2, 2500, masks=2),
    *(Setting(model, "double-masking", 2, 100, masks=2) for model in LARGE),
    Setting("zoo:tiny", "double-masking", 2, 60, masks=2, patches=2),
]


class TurnOver(Exception):  # noqa: N818
    """The next setting's turn."""


def turn(job: AttackJob, folder: Path, batch: int, seconds: float) -> bool:
    """Go on with one run for so long, at least for one batch; whether it is finished."""
    ends = time.monotonic() + seconds

    def on_progress(progress: Progress) -> None:
        if time.monotonic() > ends and progress.done < progress.total:
            raise TurnOver

    try:
        evaluate(job, folder, batch=batch, on_progress=on_progress)
    except TurnOver:
        return False
    return True


def row_of(setting: Setting, run: Run) -> dict[str, Any]:
    """What the rows of a run show so far."""
    rows = run.read()
    promised = compute.or_(*(compute.fill_null(rows[name], False) for name in ("row_certified", "detection_certified")))
    right = compute.equal(rows["undefended"], rows["label"])
    certified, unproved = rows.filter(promised), rows.filter(compute.invert(promised))
    return {
        **asdict(setting),
        "images": len(rows),
        "images_planned": run.images,
        "certified_images_attacked": len(certified),
        "certified_images_fooled": len(certified_fooled(rows)),
        "certified_images_whose_undefended_label_was_fooled": _count(certified["undefended_fooled"]),
        "other_images_fooled": _count(unproved["fooled"]),
        "undefended_right": _count(right),
        "undefended_right_under_attack": len(rows) - _count(rows["undefended_fooled"]),
        "placements": setting.locations * len(rows),
        "seconds": round(compute.sum(rows["seconds"]).as_py() or 0.0, 1),
    }


def _count(column: Any) -> int:
    return int(compute.sum(column).as_py() or 0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--minutes", type=float, default=60.0, help="how long to go on")
    parser.add_argument("--turn", type=float, default=2.0, help="minutes of each setting at a time")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--batch", type=int, default=32, help="images attacked together")
    parser.add_argument("--runs", type=Path, default=Path("runs/campaign"))
    parser.add_argument("--out", type=Path, default=Path("results/attacks/campaign.json"))
    given = parser.parse_args()
    torch.set_num_threads(1)
    ends, waiting = time.monotonic() + 60 * given.minutes, list(SETTINGS)
    jobs: dict[Setting, AttackJob] = {}
    while waiting and time.monotonic() < ends:
        setting = waiting.pop(0)
        if setting not in jobs:
            jobs[setting] = setting.job(given.device)
        seconds = min(60 * given.turn, ends - time.monotonic())
        if not turn(jobs[setting], given.runs / setting.folder, given.batch, seconds):
            waiting.append(setting)
        fooled = write(given.runs, given.out)
        if fooled:
            sys.exit(f"{fooled} certified images were fooled; their pictures are in the galleries of {given.runs}")


def write(runs: Path, out: Path) -> int:
    """Write what all runs show; the number of certified images that were fooled."""
    rows = [row_of(s, Run.open(runs / s.folder)) for s in SETTINGS if (runs / s.folder / "manifest.json").is_file()]
    counts = ("images", "certified_images_attacked", "certified_images_fooled", "placements", "seconds")
    totals = {name: round(sum(row[name] for row in rows), 1) for name in counts}
    command = shlex.join(["python", *sys.argv])
    content = {"command": command, "data": "cifar10 test", "versions": versions(), **totals, "settings": rows}
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    return int(totals["certified_images_fooled"])


if __name__ == "__main__":
    main()
