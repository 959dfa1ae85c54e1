"""patchcleanser certify and attack --task multilabel: images that show several classes each."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from patchcleanser.cli.config import call
from patchcleanser.cli.options import RunOptions, default_folder
from patchcleanser.cli.progress import LOGGER, shown
from patchcleanser.cli.tasks import CertifyTask, refuse
from patchcleanser.core.counts import counted
from patchcleanser.errors import ContradictionError, InputError

if TYPE_CHECKING:
    from patchcleanser.attacks.patch_attack import AttackSettings
    from patchcleanser.evaluation.multilabel_jobs import MultiLabelJob
    from patchcleanser.records.metrics import Summary
    from patchcleanser.records.run import Run

REFUSED = ("defense", "coarse", "precision", "split", "labels")
"""Options that mean nothing where several labels may be right."""
TITLES = {
    "undefended": "undefended, clean",
    "clean": "defended, clean",
    "certified": "certified",
    "one_mask": "bound by one mask",
    "each_class": "bound by each class",
}
"""What the rows count."""


class MultiLabelTask(CertifyTask):
    """Several labels may be right: precision and recall of the classes, against each patch of --patch."""

    name = "multilabel"
    refused = (*REFUSED, "table", "confirm", "lines", "on")

    def jobs(self) -> list[MultiLabelJob]:
        return label_jobs(self.options, self.texts)

    @staticmethod
    def described(run: Run, result: Summary) -> Iterator[str]:
        from patchcleanser.records.columns import BOUNDS

        thresholds = {f"{share:g}" for share in run.job["options"]["threshold"]}
        threshold = f"threshold {thresholds.pop()}" if len(thresholds) == 1 else "a threshold for each class"
        classes = counted(len(run.metadata["classes"]), "class")
        yield f"{run.threat}: {counted(result.images, 'image')}, {classes}, {threshold}"
        yield f"{'':20} precision   recall"
        for bound in BOUNDS:
            precision, recall = result.shares[f"{bound}_precision"], result.shares[f"{bound}_recall"]
            yield f"{TITLES[bound]:20} {precision.percent:8.2f}% {recall.percent:7.2f}%"


def label_jobs(options: RunOptions, texts: Sequence[str] = ()) -> list[MultiLabelJob]:
    """A job for each patch of a comma list; `texts` is what --option says."""
    from patchcleanser.data.multilabel_sets import load_multilabel
    from patchcleanser.evaluation.multilabel_jobs import MultiLabelJob

    named_by = call().named_by("data")
    images = load_multilabel(options.data, root=options.root, trust_code=options.trust_code, named_by=named_by)
    dataset = images.chosen(options.limit, seed=options.seed, subset=options.subset)
    patches = [replace(options, patch=patch).threat for patch in dict.fromkeys(options.patch.split(","))]
    fields = {**options.mask_set_options, "threshold": options.threshold, **_scores(texts)}
    job = MultiLabelJob.matched(options.loader(device=options.device), dataset, patches[0], **fields)
    left_out = [name for name in dataset.classes if name not in job.dataset.classes]
    if len(job.dataset.classes) < len(dataset.classes):
        LOGGER.info(f"{counted(len(dataset.classes) - len(job.dataset.classes), 'class')} left out: {left_out[:5]}")
    return [replace(job, threat=patch) for patch in patches]


def attack_labels(options: RunOptions, settings: AttackSettings, *, flags: Mapping[str, bool], as_json: bool) -> None:
    """Attack single classes of images, and count those that are turned around. Certified ones must not be."""
    from patchcleanser.evaluation import evaluate
    from patchcleanser.evaluation.multilabel_jobs import MultiLabelAttackJob
    from patchcleanser.records.run import Run

    refuse("multilabel", options, (*REFUSED, *flags), flags)
    if "," in options.patch:
        raise InputError(f"attack takes one --patch, got {options.patch!r}")
    job = MultiLabelAttackJob(label_jobs(options)[0], settings)
    job.job.check(skip=options.skip)
    name = f"{options.model}-{options.data}-{job.job.threat.shape}-classes"
    folder = options.out or default_folder(name, job.identity)
    Run.found(folder, job.identity)
    run = evaluate(job, folder, batch=options.batch, skip=options.skip, metadata=call().metadata(), progress=shown())
    print_attacked(run, as_json=as_json)


def print_attacked(run: Run, *, as_json: bool) -> None:
    """Print what an attack on classes did. ContradictionError if a certificate was refuted."""
    from patchcleanser.records.metrics import certificates_beaten

    result, beaten = run.summary(), certificates_beaten(run.read())
    if as_json:
        content = {"run": str(run.folder), "job": run.job, **run.integrity, **result.to_dict()}
        print(json.dumps({**content, "certificates_beaten": len(beaten)}, indent=1))
    else:
        classes = counted(result.shares["robust"].total, "class")
        print(f"\n{run.threat}: {classes} attacked in {counted(result.images, 'image')}, right under attack")
        for name, share in result.shares.items():
            text = share.with_interval() if share.total else "   none was attacked"
            print(f"  {name.replace('_', ' '):36} {text}")
        print(f"  {'images that beat their certificate':36} {len(beaten):6}    (must be 0)")
        print(f"  rows in {run.folder}")
    if len(beaten):
        names = ", ".join(beaten["id"].to_pylist()[:5])
        raise ContradictionError(f"certificates of {counted(len(beaten), 'image')} were refuted ({names})")


def _scores(texts: Sequence[str]) -> dict[str, str]:
    """What --option scores=… says."""
    for text in texts:
        if text not in ("scores=logits", "scores=probabilities"):
            raise InputError(f"--option takes scores=logits or scores=probabilities, got {text!r}")
    return {"scores": texts[-1].partition("=")[2]} if texts else {}
