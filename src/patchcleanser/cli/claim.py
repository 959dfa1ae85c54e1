"""patchcleanser claim: an entry of the leaderboard from the rows of a run, without a model."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from patchcleanser.errors import InputError, RecordError

if TYPE_CHECKING:
    from patchcleanser.reports.claims import DefenseClaim


def claim(
    run: Annotated[Path, typer.Argument(help="A finished run of certify, in your copy of the repository.")],
    method: Annotated[str | None, typer.Option(help="Defense and classifier, as the table shows them.")] = None,
    data: Annotated[str | None, typer.Option(help="The images, if the run's own name for them is not clear.")] = None,
    measured_by: Annotated[
        str | None, typer.Option("--by", help="Who measured it; in the repository by default: this repository.")
    ] = None,
    authors: Annotated[str | None, typer.Option(help="Authors of the paper, with the venue.")] = None,
    paper: Annotated[str | None, typer.Option(help="Title of the paper.")] = None,
    code: Annotated[str | None, typer.Option(help="Where the code is.")] = None,
    note: Annotated[str | None, typer.Option(help="A sentence that readers need.")] = None,
    out: Annotated[Path | None, typer.Option(help="File to write; by default one in leaderboard/claims.")] = None,
) -> None:
    """Write a claim for the leaderboard: what a run certified, with the hashes of its rows and of its audit."""
    from patchcleanser.records.run import Run
    from patchcleanser.reports.claims import OURS
    from patchcleanser.reports.leaderboard import CLAIMS
    from patchcleanser.reports.rederive import claim_of
    from patchcleanser.reports.wording import defense_title

    stored = Run.open(run)
    if run.is_absolute() or ".." in run.parts:
        raise InputError(
            f"a claim names its rows from the root of the repository, got {run}; go there, and name them so"
        )
    if measured_by == "":
        raise InputError("--by says who measured it, got nothing; write --by 'A. NAME'")
    if measured_by is None and not CLAIMS.is_dir():
        raise InputError("a claim says who measured it, and this is not the root of the repository: add --by 'A. NAME'")
    if out is None and not CLAIMS.is_dir():
        raise InputError(f"there is no {CLAIMS} here; go to the root of the repository, or name a file with --out")
    title = defense_title(stored.job["defense"])
    entry = claim_of(
        stored,
        method=method or f"{title[0].upper()}{title[1:]}, {stored.metadata.get('model')}",
        data=data or str(stored.metadata.get("data")),
        measured_by=OURS if measured_by is None else measured_by,
        authors=authors,
        paper=paper,
        code=code,
        note=note,
    )
    path = out or CLAIMS / entry.file_name
    _require_no_other(path, entry)
    entry.write(path)
    audit = f"audit {entry.audit_key[:12]}" if entry.audit_key else f"no audit; make one: patchcleanser audit {run}"
    print(f"wrote {path}: certified {entry.certified}%, run {str(entry.run_digest)[:12]}, {audit}")


def _require_no_other(path: Path, entry: DefenseClaim) -> None:
    """InputError if the file is there, unless it claims the same run: then it is written again."""
    from patchcleanser.reports.claims import DefenseClaim

    if not path.exists():
        return
    try:
        held = DefenseClaim.read(path).run
    except RecordError:
        held = None
    if held != entry.run:
        holds = f"the claim of {held}" if held else "something else than the claim of a run"
        raise InputError(f"{path} holds {holds}, not of {entry.run}; name another file with --out, or change --method")
