"""patchcleanser report: one page, tables and figures from runs, without a model."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

Runs = Annotated[list[Path], typer.Argument(help="Run folders, or folders that hold some, such as a sweep.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print the accuracies of each run as JSON, by its folder.")]


def report(
    runs: Runs,
    out: Annotated[
        Path | None,
        typer.Option(help="Where to write; by default report/ in the run's folder, or in the one that holds all."),
    ] = None,
    title: Annotated[str | None, typer.Option(help="Heading of the page, instead of the result itself.")] = None,
    gallery: Annotated[bool, typer.Option("--gallery/--no-gallery", help="Show the kept pictures.")] = True,
    derive: Annotated[
        bool, typer.Option("--derive/--no-derive", help="Work out from stored tables what needs no model.")
    ] = True,
    as_json: AsJson = False,
) -> None:
    """Write report.html (one file that needs nothing else), tables/ and figures/ from the rows of runs."""
    # Imported late, so that --help answers at once.
    from patchcleanser.core.metrics import COLUMNS, summary
    from patchcleanser.core.records import find_runs
    from patchcleanser.evaluation.derive import derive as derived
    from patchcleanser.reports import write_report

    found = find_runs(runs)
    folder = out or default_folder([run.folder for run in found])
    page = write_report(
        [(run, derived(run) if derive else None) for run in found], folder, title=title, pictures=gallery
    )
    if as_json:
        told = {str(run.folder): summary(run.read(COLUMNS)).to_json() for run in found}
        print(json.dumps(told, indent=1, ensure_ascii=False))
    print(f"wrote {page}", file=sys.stderr if as_json else sys.stdout)


def default_folder(runs: Sequence[Path]) -> Path:
    """report/ in the run's folder, or of several runs in the nearest folder that holds them all.

    >>> default_folder([Path("sweep/a")]).as_posix()
    'sweep/a/report'
    >>> default_folder([Path("/sweep/a"), Path("/sweep/b")]).as_posix()
    '/sweep/report'
    """
    if len(runs) == 1:
        return runs[0] / "report"
    return Path(os.path.commonpath([run.absolute() for run in runs])) / "report"
