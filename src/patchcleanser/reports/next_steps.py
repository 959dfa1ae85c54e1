"""What to do after a report: commands that run as they are printed, from the folder in which it was made."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from patchcleanser.defenses import DEFENSES
from patchcleanser.records.run import Run
from patchcleanser.reports import wording
from patchcleanser.reports.run_results import RunResult

MAX_AUDITS = 3
"""Runs for which an audit is proposed."""
ATTACKED_IMAGES = 20
"""Images of the attack that is proposed."""


@dataclass(frozen=True)
class NextStep:
    """A step with its commands, and what it shows."""

    title: str
    commands: list[str]
    why: str


def next_steps(leading: Sequence[RunResult], audited: Sequence[RunResult], *, attacked: bool) -> list[NextStep]:
    """The steps that are open: those of the first run, and an audit of each."""
    if leading[0].attacked:
        return []
    open_audits = [r for r in leading if r not in audited and _can_be_audited(r)][:MAX_AUDITS]
    audits = [_typed("audit", _folder(result.run)) for result in open_audits]
    steps = [
        NextStep("Check it", audits, "Some rows are computed again with a slow reference, certified images attacked.")
    ]
    steps += [] if attacked else _attack(leading[0])
    return [step for step in (*steps, *_certify_again(leading[0], alone=len(leading) == 1)) if step.commands]


def go_on(result: RunResult) -> str | None:
    """The command that finishes a run; without the paths it was typed with, if these are private."""
    command, kind = str(result.metadata("command") or ""), result.run.kind
    if command == wording.shorten_paths(command):
        return command or None
    if not result.options(kind):
        return None
    return _typed(kind, "--config", _folder(result.run), "--out", _folder(result.run), *_trust(result))


def _typed(*words: str) -> str:
    return shlex.join(["patchcleanser", *words])


def _folder(run: Run) -> str:
    return os.path.relpath(run.folder)


def _trust(result: RunResult) -> list[str]:
    return ["--trust-code"] if "--trust-code" in str(result.metadata("command")) else []


def _can_be_audited(result: RunResult) -> bool:
    entry = DEFENSES.get(result.run.job["defense"])
    named = result.metadata("model") and result.metadata("data")
    elsewhere = result.options("certify").get("root")
    return bool(entry and entry.reference and named and not elsewhere and not result.missing)


def _attack(result: RunResult) -> list[NextStep]:
    """The defense attacked on the same model, data and patch, if options can say all of them."""
    options, job = result.options("certify"), result.run.job
    threat = job["threat"]
    if not options or not result.has_masks or threat["region"] or set(job["options"]) - {"coarse", "threshold"}:
        return []
    words = [
        word for name in ("model", "data", "split", "root") if options.get(name) for word in _option(options, name)
    ]
    if any(word != wording.shorten_paths(word) for word in words):
        return []  # private paths
    words += ["--patch", threat["shape"], *(["--patches", str(threat["count"])] if threat["count"] > 1 else [])]
    words += ["--grid", "input"] if threat["grid"] == "input" else []
    words += [word for name in ("masks", "stride") if job.get(name) for word in (f"--{name}", _pair(job[name]))]
    words += _option(job, "defense") if job["defense"] != "double-masking" else []
    words += [word for name in job["options"] for word in _option(job["options"], name)]
    words += ["--attack", "square" if str(options["model"]).startswith("onnx:") else "adaptive"]
    out = f"{_folder(result.run)}-attack"
    attack = _typed("attack", *words, "--limit", str(ATTACKED_IMAGES), "--out", out, *_trust(result))
    return [NextStep("Attack it", [attack, _report(result, out)], "What becomes of images that are not certified.")]


def _certify_again(result: RunResult, *, alone: bool) -> Iterator[NextStep]:
    """The same run with a table, with other masks, and on more images."""
    options, masks = result.options("certify"), result.run.job.get("masks")
    if not options or not result.has_masks:
        return
    folder = _folder(result.run)

    def again(ending: str, *words: str) -> str:
        each = {"patch": result.run.job["threat"]["shape"], "defense": result.run.job["defense"]}
        each |= {"masks": _pair(masks)} if masks else {}
        swept = [name for name in each if "," in str(options.get(name)) and f"--{name}" not in words]
        single = [word for name in swept for word in _option(each, name)]
        return _typed("certify", "--config", folder, *single, *words, "--out", f"{folder}-{ending}", *_trust(result))

    if not result.run.job.get("table") and not result.detects:
        shows = "Where each proof fails, and what smaller patches and other defenses would give."
        yield NextStep("Store the tables", [again("table", "--table"), _typed("report", f"{folder}-table")], shows)
    if masks and alone:
        other = "5" if masks == [4, 4] else "4"
        ending = f"{other}x{other}"
        commands = [again(ending, "--masks", other), _report(result, f"{folder}-{ending}")]
        yield NextStep("Try other masks", commands, "Both runs are compared image by image.")
    if isinstance(options.get("limit"), int):
        more = str(4 * options["limit"])
        yield NextStep(
            "Use more images", [again(more, "--limit", more)], "Four times as many about halve the intervals."
        )


def _report(result: RunResult, other: str) -> str:
    return _typed("report", _folder(result.run), other)


def _option(options: dict[str, object], name: str) -> list[str]:
    return [f"--{name}", str(options[name])]


def _pair(sides: Sequence[int]) -> str:
    return str(sides[0]) if sides[0] == sides[1] else f"{sides[0]}x{sides[1]}"
