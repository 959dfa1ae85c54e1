"""patchcleanser reproduce: the paper's tables and figures, ours beside theirs, as far as models and data are here."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from patchcleanser.cli.options import AsJson, Device, Limit, Precision, RunnerOptions, Seed, TrustCode
from patchcleanser.errors import DataError, InputError

if TYPE_CHECKING:
    from patchcleanser.evaluation.timing import Latencies
    from patchcleanser.evaluation.workloads import Runner
    from patchcleanser.paper import Experiment, Finding, Plan
    from patchcleanser.paper.running import Archive, Hands, Laboratory, Missing
    from patchcleanser.records.run import Run

    Results = tuple[Experiment, dict[str, Finding], dict[str, str]]
    """An experiment, its measurements by row, and why other rows are missing."""

Names = Annotated[list[str] | None, typer.Argument(help="Tables and figures: table2 figure4 …, or all.")]


def reproduce(
    cluster: RunnerOptions,
    names: Names = None,
    listed: Annotated[bool, typer.Option("--list", help="List tables and figures, and their models.")] = False,
    commands: Annotated[bool, typer.Option("--commands", help="Print the commands that make our models.")] = False,
    limit: Limit = None,
    models: Annotated[str | None, typer.Option(help="Only these models: a comma list of names or specs.")] = None,
    data: Annotated[str | None, typer.Option(help="Only these datasets: a comma list.")] = None,
    root: Annotated[Path | None, typer.Option(help="Folder that holds the datasets.")] = None,
    seed: Seed = 0,
    device: Device = "auto",
    precision: Precision = "exact",
    out: Annotated[Path, typer.Option(help="Folder for results, tables and figures.")] = Path("runs/reproduce"),
    runs: Annotated[Path | None, typer.Option(help="Run folders; by default runs/ in --out.")] = None,
    baselines: Annotated[
        Path, typer.Option(help="Rows of the defenses that ours is compared with, from benchmarks/baselines.py.")
    ] = Path("results/baselines.json"),
    stored: Annotated[bool, typer.Option("--stored", help="Only read finished runs; needs no model.")] = False,
    page: Annotated[Path | None, typer.Option(help="Only write what --out holds as Markdown to this file.")] = None,
    trust_code: TrustCode = False,
    as_json: AsJson = False,
) -> None:
    """Run what a table or figure of the paper needs, go on where it stopped, and lay ours beside the paper's."""
    from patchcleanser.paper import EXPERIMENTS
    from patchcleanser.paper.models import training_commands
    from patchcleanser.paper.running import Archive, Laboratory

    if limit is not None and limit < 1:
        raise InputError(f"at least 1 image is needed, got a limit of {limit}")
    if listed:
        _print_list(as_json)
        return
    if commands:
        print("\n".join(training_commands(root)))
        return
    if page is not None:
        _write_markdown(out, page)
        return
    chosen = [_restrict(EXPERIMENTS[name], models, data) for name in _experiment_names(names or [])]
    if stored:
        _print_results(_run_all(chosen, Archive(runs or out / "runs", root), out, baselines), out, as_json=as_json)
        return
    with cluster.start() as runner:
        laboratory = Laboratory(
            runs or out / "runs",
            _hands(runner, quiet=as_json),
            root=root,
            limit=limit,
            seed=seed,
            device=cluster.device(device),
            workers=cluster.worker_device if cluster.on == "ray" else None,
            precision=precision,  # type: ignore[arg-type]  # checked by the defense
            trust_code=trust_code,
        )
        results = _run_all(chosen, laboratory, out, baselines)
    _print_results(results, out, as_json=as_json)


def _experiment_names(names: list[str]) -> list[str]:
    from patchcleanser.paper import EXPERIMENTS

    if not names:
        raise InputError(f"say which: {', '.join(EXPERIMENTS)}, or all; --list says what they are")
    for name in names:
        if name != "all" and name not in EXPERIMENTS:
            raise InputError(f"no experiment {name!r}; there are {', '.join(EXPERIMENTS)}, or all")
    return list(EXPERIMENTS) if "all" in names else list(dict.fromkeys(names))


def _restrict(experiment: Experiment, models: str | None, data: str | None) -> Experiment:
    """Only the rows of these models and datasets. A classifier of the user's own replaces every model."""
    from patchcleanser.paper.images import DATA
    from patchcleanser.paper.models import model_of

    lines = experiment.lines
    if data is not None:
        for name in data.split(","):
            if name not in DATA:
                raise InputError(f"no dataset {name!r} in the experiments; there are {', '.join(DATA)}")
        lines = tuple(line for line in lines if line.plan.data in data.split(","))
    if models is not None:
        wanted = [model_of(name).name for name in models.split(",")]
        matching = [line for line in lines if line.plan.model in wanted]
        own = [name for name in wanted if ":" in name]
        if own and data is None:
            raise InputError(f"{own[0]} is no model of the experiments; say with --data which images it is for")
        lines = tuple(dict.fromkeys([*matching, *(line.of(name) for name in own for line in lines)]))
    return replace(experiment, lines=lines)


def _hands(runner: Runner, *, quiet: bool) -> Hands:
    """The same as certify and attack do, with the same progress."""
    from patchcleanser.cli.certify import run_metadata
    from patchcleanser.cli.progress import run_progress
    from patchcleanser.evaluation import evaluate
    from patchcleanser.paper.running import Hands

    def run(job: Any, folder: Path, metadata: dict[str, Any]) -> Run:
        if not quiet and not folder.exists():
            print(folder.name, file=sys.stderr)  # progress names patch and masks, but not the line
        with run_progress(job, folder, quiet=quiet) as on_progress:
            return evaluate(job, folder, metadata=metadata, on_progress=on_progress, runner=runner)

    return Hands(certify=run, attack=run, metadata=run_metadata)


def _run_all(chosen: list[Experiment], laboratory: Laboratory | Archive, out: Path, rows: Path) -> list[Results]:
    """Run experiments one after the other, each run once; measurements are written after each experiment."""
    from patchcleanser.paper import EXPERIMENTS
    from patchcleanser.paper.baselines import measured
    from patchcleanser.paper.collecting import collect, keep
    from patchcleanser.paper.pages import section, write_section

    outcomes: dict[Plan, Run | Latencies | Missing] = {}
    results: list[Results] = []
    for experiment in chosen:
        for plan in experiment.plans:
            if plan not in outcomes:
                outcomes[plan] = laboratory.run(plan)
        measurements, missing = collect(experiment, outcomes, laboratory.root)
        lines = dict.fromkeys([*EXPERIMENTS[experiment.name].lines, *experiment.lines])
        declared = replace(experiment, lines=tuple(lines))
        elsewhere = {key: value for key, value in measured(rows).items() if key in {line.key for line in lines}}
        keep(declared, elsewhere, out)
        merged = keep(declared, measurements, out)
        missing = {key: why for key, why in missing.items() if key not in elsewhere}
        if merged:
            write_section(section(declared, merged), out)
        results.append((declared, merged, missing | _draw_pictures(experiment, laboratory)))
    _write_page(results, out)
    return results


def _write_page(results: list[Results], out: Path) -> None:
    """Write a page of all measurements in the folder, of these experiments and of those run before."""
    from patchcleanser.paper import EXPERIMENTS
    from patchcleanser.paper.collecting import read_found
    from patchcleanser.paper.pages import section, write_page

    by_name = {name: (experiment, read_found(out, name)) for name, experiment in EXPERIMENTS.items()}
    by_name |= {experiment.name: (experiment, measurements) for experiment, measurements, _ in results}
    sections = [section(experiment, measurements) for experiment, measurements in by_name.values() if measurements]
    if sections:
        write_page(sections, out)


def _draw_pictures(experiment: Experiment, laboratory: Laboratory | Archive) -> dict[str, str]:
    """Draw pictures of the data beside the runs: they show other people's photos, so they are no results to publish."""
    from patchcleanser.reports.drawing import save

    if experiment.pictures is None:
        return {}
    try:
        save(experiment.pictures(laboratory.root), laboratory.runs)
    except DataError as error:
        return {experiment.name: str(error)}
    print(f"wrote {laboratory.runs / experiment.name}.png", file=sys.stderr)
    return {}


def _write_markdown(out: Path, page: Path) -> None:
    from patchcleanser.paper import EXPERIMENTS
    from patchcleanser.paper.collecting import read_found
    from patchcleanser.paper.pages import results_page
    from patchcleanser.records.atomic import whole_file

    if not any(read_found(out, name) for name in EXPERIMENTS):
        raise InputError(f"{out} holds no findings, so {page} is left as it is; name their folder with --out")
    with whole_file(page) as part:
        part.write_text(results_page(out), encoding="utf-8")
    print(f"wrote {page}")


def _print_list(as_json: bool) -> None:
    from patchcleanser.paper import EXPERIMENTS

    rows: list[dict[str, Any]] = [
        {
            "name": e.name,
            "paper": e.paper,
            "title": e.title,
            "lines": len(e.lines),
            "models": list(dict.fromkeys(line.plan.model for line in e.lines)),
            "data": list(dict.fromkeys(line.plan.data for line in e.lines)),
        }
        for e in EXPERIMENTS.values()
    ]
    if as_json:
        print(json.dumps(rows, indent=1))
        return
    for row in rows:
        size = f"{row['lines']} lines" if row["lines"] else "pictures only"
        print(f"{row['name']:9} {row['paper']:24} {row['title']} ({size})")
        if row["lines"]:
            print(f"{'':9} images: {', '.join(row['data'])}; models: {', '.join(row['models'])}")


def _print_results(results: list[Results], out: Path, *, as_json: bool) -> None:
    """Print tables and claims, and why rows are missing, each reason once."""
    from patchcleanser.paper.tabling import claim_lines, experiment_table
    from patchcleanser.reports.tables import to_markdown

    if as_json:
        rows = {
            experiment.name: {"findings": {key: f.to_json() for key, f in measurements.items()}, "missing": missing}
            for experiment, measurements, missing in results
        }
        print(json.dumps(rows, indent=1, ensure_ascii=False))
        return
    for experiment, measurements, _ in results:
        if measurements:
            print(f"\n{to_markdown(experiment_table(experiment, measurements).shown())}")
        for line in claim_lines(experiment, measurements):
            print(f"- {line}")
    reasons = dict.fromkeys(why for _, _, missing in results for why in missing.values())
    for why in reasons:
        print(f"left out: {why}", file=sys.stderr)
    if any(measurements for _, measurements, _ in results):
        print(f"\nfindings, tables, figures and results.html are in {out}")
    elif reasons:
        raise InputError("nothing could be measured; what is missing stands above")
