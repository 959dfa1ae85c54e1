"""Measure the certified defenses that PatchCleanser is compared with, each with the network made for it.

    python benchmarks/baselines.py --commands                     # what to run, and about how long it takes
    python benchmarks/baselines.py ds bagcert --models runs/baselines --out results/baselines.json
    python benchmarks/baselines.py --merge rows/baselines-*.json  # rows that several jobs measured, into --out

A row says defense, patch, images, clean, certified and ms an image, with the weights, the command and the hardware;
a row of the same defense, network, recipe, patch and options is replaced. The run folders hold a record for each
image; a run that stopped goes on.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from patchcleanser import Threat, load_classifier
from patchcleanser.classifiers.trained import read_card
from patchcleanser.data import chosen, load_dataset
from patchcleanser.evaluation import Job, evaluate
from patchcleanser.paper.baselines import BASELINES, PATCHES, Baseline, row_key
from patchcleanser.records.columns import COLUMNS
from patchcleanser.records.metrics import summary
from patchcleanser.records.provenance import versions

ROWS, COSTS = "results/baselines.json", "results/baselines-224.json"


def row_of(baseline: Baseline, patch: str, words: argparse.Namespace) -> dict[str, Any]:
    """One measurement on CIFAR-10, with the weights made for it."""
    weights = words.models / baseline.name(patch)
    card, spec = read_card(weights), f"trained:{weights}"
    job = Job(
        load_classifier(spec),
        chosen(load_dataset("cifar10", split=words.split), words.limit, subset="first"),
        Threat.parse(patch),
        baseline.defense,
        options=dict(baseline.options if words.option is None else words.option),
    )
    named = [baseline.defense, weights.name, patch, *(f"{name}={value:g}" for name, value in job.options.items())]
    named += [] if words.split == "test" else [words.split]
    folder = (words.runs or words.models) / "-".join(named)
    return {
        "defense": baseline.defense,
        "network": card["model"],
        "patch": PATCHES[patch],
        "grid": "source",
        "data": "cifar10",
        "at": 32,
        **measured(job, folder),
        "printed": list(baseline.printed(patch).values()) or None,
        "recipe": card["recipe"],
        "seed": card["seed"],
        "weights_sha256": card["weights_sha256"],
        "train_command": card["command"],
    }


def measured(job: Job, folder: Path) -> dict[str, Any]:
    """What certifying a job gave, and what it took."""
    command = shlex.join(["python", "benchmarks/baselines.py", *sys.argv[1:]])
    run = evaluate(job, folder, metadata={"command": command}, progress=True)
    totals = summary(run.read(COLUMNS))
    return {
        "images": totals.images,
        **{name: round(share.percent, 2) for name, share in totals.shares.items() if share.total},
        "ms": round(1000 * totals.seconds / max(1, totals.images), 3),
        "classifications": totals.classifications / max(1, totals.images),
        "options": job.options,
        "command": command,
        "versions": versions(),
    }


def keep(row: dict[str, Any], out: Path) -> None:
    """Write a row, in place of one of the same defense, network, recipe, patch and options."""
    rows = json.loads(out.read_text(encoding="utf-8")) if out.is_file() else []
    rows = [old for old in rows if row_key(old) != row_key(row)]
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps([*rows, row], indent=1) + "\n", encoding="utf-8")


SMOKE: list[tuple[str, str, dict[str, Any]]] = [
    ("cbn", "net:bagnet17", {}),
    ("pg-bn", "net:bagnet17", {}),
    ("patchguard++", "net:bagnet17", {}),
    ("bagcert", "net:bagnet17?votes=true", {}),
    ("ibp", "net:interval?size=224&classes=1000&width=8", {}),
    ("ds", "tokens:timm:vit_small_patch16_224?weights=none", {"keep": 25, "threshold": 0.2}),
    ("ds", "torchvision:resnet50?weights=none", {"keep": 25, "threshold": 0.2}),
    ("pg-ds", "torchvision:resnet50?weights=none", {"keep": 25}),
]
"""What each costs on 200 images of ImageNet's size, against 2% of their pixels; these networks were never trained."""


def smoke_row(defense: str, spec: str, options: dict[str, Any], words: argparse.Namespace) -> dict[str, Any]:
    """Its cost; accuracies of untrained networks mean nothing and are left out."""
    dataset = chosen(load_dataset(words.smoke), words.limit or 200, subset="first")
    job = Job(load_classifier(spec), dataset, Threat.parse("2%", grid="input"), defense, options=options)
    folder = (words.runs or words.models) / "-".join(["imagenet", defense, spec.split(":")[-1].partition("?")[0]])
    row = measured(job, folder)
    columns = ("images", "ms", "classifications", "options", "command", "versions")
    return {"defense": defense, "network": spec, "patch": "2%", **{name: row[name] for name in columns}}


def commands(root: Path, out: Path) -> list[str]:
    """Every command, in order; weights that several defenses share are made once."""
    training = [f"{b.command(patch)} --out {root}/{b.name(patch)}" for b in BASELINES for patch in PATCHES]
    lines = dict.fromkeys(training, "one or two minutes on an H200 (a guess)")
    names = list(dict.fromkeys(baseline.defense for baseline in BASELINES))
    measure = ["python", "benchmarks/baselines.py", *names, "--models", str(root), "--out", str(out)]
    lines[shlex.join(measure)] = "about 15 min for 10,000 images and both patches (a guess)"
    smoke = ["python", "benchmarks/baselines.py", "--smoke", "parquet:imagenet-val*.parquet"]
    lines[shlex.join(smoke)] = "cost at 224×224: about 2 min (a guess)"
    return [f"{command}  # {note}" for command, note in lines.items()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("defenses", nargs="*", help="which ones; all that have weights if none is named")
    parser.add_argument("--commands", action="store_true", help="print what to run")
    parser.add_argument("--models", type=Path, default=Path("runs/baselines"))
    parser.add_argument(
        "--weights", help="only the defenses that use this folder of --models; interval-5 is one of interval"
    )
    parser.add_argument("--patch", action="append", choices=list(PATCHES))
    parser.add_argument(
        "--option", type=_option, action="append", metavar="NAME=NUMBER", help="of the defenses, instead of theirs"
    )
    parser.add_argument(
        "--split", choices=["test", "train"], default="test", help="train: to choose options by; its rows are not kept"
    )
    parser.add_argument("--limit", type=int)
    parser.add_argument("--runs", type=Path, help="where the records go; beside the models if not given")
    parser.add_argument("--smoke", metavar="DATA", help="measure only what untrained networks of 224×224 px cost")
    parser.add_argument("--merge", type=Path, nargs="+", help="files of rows to put into --out")
    parser.add_argument("--out", type=Path, help=f"{ROWS}, or {COSTS} with --smoke, if not given")
    words = parser.parse_args()
    words.out = words.out or Path(COSTS if words.smoke else ROWS)
    if words.commands:
        print("\n".join(commands(words.models, words.out)))
        return
    for path in words.merge or []:
        for row in json.loads(path.read_text(encoding="utf-8")):
            keep(row, words.out)
    if words.merge:
        return
    for row in smoke_rows(words) if words.smoke else rows(words):
        if words.split == "test":
            keep(row, words.out)
        print({name: row.get(name) for name in ("defense", "network", "patch", "clean", "certified", "ms")})


def _option(text: str) -> tuple[str, float]:
    name, _, number = text.partition("=")
    return name, float(number)


def rows(words: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Every row that was asked for and has weights."""
    for baseline in BASELINES:
        for patch in words.patch or PATCHES:
            named = not words.defenses or baseline.defense in words.defenses
            used = words.weights in (None, baseline.folder, baseline.name(patch))
            if named and used and (words.models / baseline.name(patch) / "card.json").is_file():
                yield row_of(baseline, patch, words)


def smoke_rows(words: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """The cost of each defense that was asked for."""
    for defense, spec, options in SMOKE:
        if not words.defenses or defense in words.defenses:
            yield smoke_row(defense, spec, options, words)


if __name__ == "__main__":
    main()
