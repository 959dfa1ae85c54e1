"""patchcleanser report: a page, tables and figures from runs of certify and attack, without a model."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from patchcleanser.records.run import Run


def report(
    runs: Annotated[list[Path], typer.Argument(help="Run folders, or folders that hold some, such as a sweep.")],
    out: Annotated[
        Path | None,
        typer.Option(help="Folder to write; by default RUN/report; of several, report in their common folder."),
    ] = None,
    title: Annotated[str | None, typer.Option(help="Heading of the page, instead of the result itself.")] = None,
    gallery: Annotated[bool, typer.Option("--gallery/--no-gallery", help="Show the saved pictures.")] = True,
    derive: Annotated[bool, typer.Option("--derive/--no-derive", help="Derive more from stored tables.")] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print the accuracies of each run as JSON.")] = False,
) -> None:
    """Write report.html (one file that needs nothing else), tables/ and figures/ from the rows of runs."""
    # Imported late, so that --help answers at once.
    from patchcleanser.errors import InputError
    from patchcleanser.records.atomic import require_inside
    from patchcleanser.records.derive import derive as derived
    from patchcleanser.records.run import find_runs
    from patchcleanser.reports import write_multilabel_report, write_object_report, write_report
    from patchcleanser.reports.page import require_report_folder

    stored, left_out = find_runs(runs)
    stored = [run.snapshot() for run in stored]  # a run may go on meanwhile
    folder = out or default_folder([run.folder for run in stored])
    if out is None:
        require_inside(folder, folder.parent)
    require_report_folder(folder)
    pages = {"detect": write_object_report, "multilabel": write_multilabel_report}
    attacked = [run.folder for run in stored if run.kind == "multilabel-attack"]
    if attacked:
        raise InputError(
            f"{attacked[0]} is an attack on single classes, which has no page; its command prints it again"
        )
    kinds = {run.kind if run.kind in pages else "classify" for run in stored}
    if len(kinds) > 1:
        raise InputError(f"runs of {' and '.join(sorted(kinds))} have no page in common; report them one by one")
    write = pages.get(kinds.pop())
    if write is not None:
        page = write(stored, folder, title=title, pictures=gallery)
    else:
        studies = [(run, derived(run) if derive else None) for run in stored]
        page = write_report(studies, folder, title=title, pictures=gallery)
    if as_json:
        print(json.dumps({str(run.folder): accuracies(run) for run in stored}, indent=1, ensure_ascii=False))
    for note in [*(f"left out: {run}" for run in left_out), *notes(stored)]:
        print(note, file=sys.stderr)
    print(f"wrote {page}", file=sys.stderr if as_json else sys.stdout)
    for run in (run for run in stored if run.finished and not as_json):
        print(f"run digest of {run.folder}: {run.digest}")


def accuracies(run: Run) -> dict[str, object]:
    """What the rows of a run show, as plain numbers."""
    from patchcleanser.records.columns import COLUMNS_OF
    from patchcleanser.records.metrics import certified_fooled, summary

    rows = run.read(COLUMNS_OF[run.kind])
    fooled = {"certified_images_fooled": len(certified_fooled(rows))} if run.kind == "attack" else {}
    return {**summary(rows).to_dict(), **fooled, **run.integrity}


def notes(runs: Sequence[Run]) -> list[str]:
    """Which runs are left out of the report, unchecked or unfinished, and why."""
    from patchcleanser.core.counts import counted
    from patchcleanser.reports.contents import misfits

    unfit = {run.folder: why for run, why in misfits(runs)}
    lines = [f"left out: {folder}, {why}" for folder, why in unfit.items()]
    lines += [f"unchecked: {run.unchecked}" for run in runs if run.unchecked]
    for run in (run for run in runs if run.folder not in unfit):
        rows = run.read(["skipped"])
        command = f"; go on with: {run.metadata['command']}" if run.metadata.get("command") else ""
        if rows["skipped"].null_count == 0:
            why = f"each image was skipped ({len(rows):,})" if len(rows) else f"it holds no rows yet{command}"
            lines.append(f"left out: {run.folder}, {why}")
        elif run.missing():
            missing = f"{run.images - len(rows):,} of {counted(run.images, 'image')} missing"
            lines.append(f"not finished: {run.folder}, {missing}{command}")
    return lines


def default_folder(runs: Sequence[Path]) -> Path:
    """report/ in the run's folder, or of several runs in the nearest folder that holds them all.

    >>> default_folder([Path("sweep/a")]).as_posix()
    'sweep/a/report'
    >>> default_folder([Path("/sweep/a"), Path("/sweep/b")]).as_posix()
    '/sweep/report'
    >>> default_folder([Path("sweep/a"), Path("sweep/b")]).as_posix()
    'sweep/report'
    """
    if len(runs) == 1:
        return runs[0] / "report"
    shared = Path(os.path.commonpath([run.absolute() for run in runs]))
    relative = not any(run.is_absolute() for run in runs)  # a user who typed relative paths reads one
    return (Path(os.path.relpath(shared)) if relative else shared) / "report"
