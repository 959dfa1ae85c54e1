"""patchcleanser reproduce: the paper's tables and figures, ours beside theirs, as far as models and data are here."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from patchcleanser.cli.options import AsJson, Device, Limit, Precision, RunnerOptions, Seed, TrustCode
from patchcleanser.cli.progress import LOGGER, shown
from patchcleanser.core.counts import counted
from patchcleanser.errors import DataError, InputError

if TYPE_CHECKING:
    from patchcleanser.evaluation import AttackJob, Job
    from patchcleanser.evaluation.workloads import Runner
    from patchcleanser.paper import Experiment, Measurement, RunSpec
    from patchcleanser.paper.runners import Execute, LiveRunner, Outcome, StoredRunner
    from patchcleanser.records.run import Run

    Results = tuple[Experiment, dict[str, Measurement], dict[str, str]]
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
    from patchcleanser.paper.runners import LiveRunner, StoredRunner
    from patchcleanser.records.atomic import interruptible

    if out.is_file():
        raise InputError(f"{out} is a file, not a folder; choose another --out")
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
        _print_results(_run_all(chosen, StoredRunner(runs or out / "runs", root), out, baselines), out, as_json=as_json)
        return
    with cluster.start() as runner:
        live = LiveRunner(
            runs or out / "runs",
            _execute(runner),
            root=root,
            limit=limit,
            seed=seed,
            device=cluster.device(device),
            worker_device=cluster.worker_device if cluster.on == "ray" else None,
            precision=precision,  # type: ignore[arg-type]  # checked by the defense
            trust_code=trust_code,
        )
        with interruptible(lambda: any(live.runs.glob("*/rows-*.parquet"))):
            results = _run_all(chosen, live, out, baselines)
    _print_results(results, out, as_json=as_json)


def _experiment_names(names: list[str]) -> list[str]:
    from patchcleanser.paper import EXPERIMENTS

    if not names:
        raise InputError(f"say which: {', '.join(EXPERIMENTS)}, or all; --list says what they are")
    for name in names:
        if name != "all" and name not in EXPERIMENTS:
            raise InputError.unknown("experiment", name, [*EXPERIMENTS, "all"])
    return list(EXPERIMENTS) if "all" in names else list(dict.fromkeys(names))


def _restrict(experiment: Experiment, models: str | None, data: str | None) -> Experiment:
    """Only the rows of these models and datasets. A classifier of the user's own replaces every model."""
    from patchcleanser.paper.models import PAPER_DATASETS, find_model

    rows = experiment.rows
    if data is not None:
        for name in data.split(","):
            if name not in PAPER_DATASETS:
                raise InputError.unknown("dataset", name, PAPER_DATASETS, " in the experiments")
        rows = tuple(row for row in rows if row.spec.data in data.split(","))
    if models is not None:
        wanted = [find_model(name).name for name in models.split(",")]
        matching = [row for row in rows if row.spec.model in wanted]
        own = [name for name in wanted if ":" in name]
        if own and data is None:
            raise InputError(f"{own[0]} is no model of the experiments; say with --data which images it is for")
        rows = tuple(dict.fromkeys([*matching, *(row.with_model(name) for name in own for row in rows)]))
    return replace(experiment, rows=rows)


def _execute(runner: Runner) -> Execute:
    """Run jobs as certify and attack do, with the same progress."""
    from patchcleanser.evaluation import evaluate

    def run(job: Job | AttackJob, folder: Path, metadata: dict[str, Any]) -> Run:
        if not folder.exists():
            LOGGER.info(folder.name)  # progress names patch and masks, but not the row
        return evaluate(job, folder, metadata=metadata, progress=shown(), runner=runner)

    return run


def _run_all(chosen: list[Experiment], runner: LiveRunner | StoredRunner, out: Path, rows: Path) -> list[Results]:
    """Run experiments one after the other, each run once; measurements are written after each experiment."""
    from patchcleanser.paper import EXPERIMENTS
    from patchcleanser.paper.baselines import read_baselines
    from patchcleanser.paper.measurements import collect, merge_measurements
    from patchcleanser.paper.pages import Section

    outcomes: dict[RunSpec, Outcome] = {}
    results: list[Results] = []
    for experiment in chosen:
        for spec in experiment.specs:
            if spec not in outcomes:
                outcomes[spec] = runner.run(spec)
        measurements, missing = collect(experiment, outcomes, runner.root)
        declared_rows = dict.fromkeys([*EXPERIMENTS[experiment.name].rows, *experiment.rows])
        declared = replace(experiment, rows=tuple(declared_rows))
        elsewhere = {
            key: value for key, value in read_baselines(rows).items() if key in {row.key for row in declared_rows}
        }
        merge_measurements(declared, elsewhere, out)
        merged = merge_measurements(declared, measurements, out)
        missing = {key: why for key, why in missing.items() if key not in elsewhere}
        if merged:
            Section(declared, merged).write(out)
        results.append((declared, merged, missing | _draw_pictures(experiment, runner)))
    _write_page(results, out)
    return results


def _write_page(results: list[Results], out: Path) -> None:
    """Write a page of all measurements in the folder, of these experiments and of those run before."""
    from patchcleanser.paper import EXPERIMENTS
    from patchcleanser.paper.measurements import read_measurements
    from patchcleanser.paper.pages import Section, write_page

    by_name = {name: (experiment, read_measurements(out, name)) for name, experiment in EXPERIMENTS.items()}
    by_name |= {experiment.name: (experiment, measurements) for experiment, measurements, _ in results}
    sections = [Section(experiment, measurements) for experiment, measurements in by_name.values() if measurements]
    if sections:
        write_page(sections, out)


def _draw_pictures(experiment: Experiment, runner: LiveRunner | StoredRunner) -> dict[str, str]:
    """Draw pictures of the data beside the runs: they show other people's photos, so they are no results to publish."""
    from patchcleanser.reports.drawing import save

    if experiment.pictures is None:
        return {}
    try:
        save(experiment.pictures(runner.root), runner.runs)
    except DataError as error:
        return {experiment.name: str(error)}
    print(f"wrote {runner.runs / experiment.name}.png", file=sys.stderr)
    return {}


def _write_markdown(out: Path, page: Path) -> None:
    from patchcleanser.paper import EXPERIMENTS
    from patchcleanser.paper.measurements import read_measurements
    from patchcleanser.paper.pages import results_page
    from patchcleanser.records.atomic import whole_file

    if not any(read_measurements(out, name) for name in EXPERIMENTS):
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
            "lines": len(e.rows),
            "models": list(dict.fromkeys(row.spec.model for row in e.rows)),
            "data": list(dict.fromkeys(row.spec.data for row in e.rows)),
        }
        for e in EXPERIMENTS.values()
    ]
    if as_json:
        print(json.dumps(rows, indent=1))
        return
    for row in rows:
        size = counted(row["lines"], "line") if row["lines"] else "pictures only"
        print(f"{row['name']:9} {row['paper']:24} {row['title']} ({size})")
        if row["lines"]:
            print(f"{'':9} images: {', '.join(row['data'])}; models: {', '.join(row['models'])}")


def _print_results(results: list[Results], out: Path, *, as_json: bool) -> None:
    """Print tables and claims, and why rows are missing, each reason once."""
    from patchcleanser.paper.pages import Section
    from patchcleanser.reports.tables import to_markdown

    if as_json:
        rows = {
            experiment.name: {"findings": {key: f.to_dict() for key, f in measurements.items()}, "missing": missing}
            for experiment, measurements, missing in results
        }
        print(json.dumps(rows, indent=1, ensure_ascii=False))
        return
    for experiment, measurements, _ in results:
        if measurements:
            print(f"\n{to_markdown(Section(experiment, measurements).table.shown())}")
        for line in Section(experiment, measurements).claims:
            print(f"- {line}")
    reasons = dict.fromkeys(why for _, _, missing in results for why in missing.values())
    for why in reasons:
        print(f"left out: {why}", file=sys.stderr)
    if any(measurements for _, measurements, _ in results):
        print(f"\nfindings, tables, figures and results.html are in {out}")
    elif reasons:
        raise InputError("nothing could be measured; what is missing stands above")
