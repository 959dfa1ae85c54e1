"""The command: where it writes, what it prints, how it fails."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner, Result

from patchcleanser import reports
from patchcleanser.cli.report import report
from patchcleanser.errors import RecordError
from patchcleanser.records.columns import COLUMNS
from patchcleanser.records.metrics import summary
from patchcleanser.records.run import Run
from patchcleanser.reports import write_report

MakeRun = Callable[..., Run]


def typed(*words: str | Path) -> Result:
    app = typer.Typer(pretty_exceptions_enable=False)
    app.command()(report)
    return CliRunner().invoke(app, [str(word) for word in words])


def test_one_run_is_reported_inside_its_folder(make_run: MakeRun) -> None:
    run = make_run()
    done = typed(run.folder)
    assert done.exit_code == 0, done.output
    digest = f"run digest of {run.folder}: {run.digest}"
    assert done.stdout.splitlines() == [f"wrote {run.folder / 'report' / 'report.html'}", digest]
    assert (run.folder / "report" / "report.html").is_file()
    assert typed(run.folder).exit_code == 0  # a second report is written over the first


def test_a_folder_of_other_files_is_not_written_into(make_run: MakeRun, tmp_path: Path) -> None:
    run, out = make_run(), tmp_path / "site"
    out.mkdir()
    (out / "report.html").write_text("<title>Annual report</title>")
    for named, words in ((out, "site holds no report of ours, but report.html"), (out / "report.html", "is a file")):
        done = typed(run.folder, "--out", named)
        assert isinstance(done.exception, RecordError)
        assert words in str(done.exception)
    assert [path.name for path in out.iterdir()] == ["report.html"]
    (out / "report.html").unlink()
    (out / "tables").mkdir()  # as a report that was stopped leaves it
    assert typed(run.folder, "--out", out).exit_code == 0


def test_several_runs_are_reported_in_the_folder_that_holds_them(make_run: MakeRun, tmp_path: Path) -> None:
    make_run("sweep/a")
    make_run("sweep/b", masks=3)
    assert typed(tmp_path / "sweep", "--no-gallery").exit_code == 0
    assert (tmp_path / "sweep" / "report" / "report.html").is_file()


def test_tables_and_figures_of_an_earlier_report_do_not_stay(make_run: MakeRun, tmp_path: Path) -> None:
    first, second, out = make_run("a"), make_run("b", masks=3), tmp_path / "report"

    def files() -> set[str]:
        return {str(path.relative_to(out)) for path in out.rglob("*.*")}

    assert typed(first.folder, "--out", out).exit_code == 0
    alone = files()
    (out / "tables" / "mine.csv").write_text("not the report's")
    assert typed(first.folder, second.folder, "--out", out).exit_code == 0
    assert files() - alone > {"tables/mine.csv"}
    assert typed(first.folder, "--out", out).exit_code == 0
    assert files() == alone | {"tables/mine.csv"}
    (out / "report-files.json").write_text("[[1]]")  # somebody's
    assert typed(first.folder, "--out", out).exit_code == 0


def test_json_prints_the_summaries_by_run_folder(make_run: MakeRun, tmp_path: Path) -> None:
    run = make_run()
    done = typed(run.folder, "--json", "--no-derive", "--out", tmp_path / "elsewhere", "--title", "A title")
    checked = {"digest": run.digest, "unchecked": None, "statistical": None}
    assert json.loads(done.stdout) == {str(run.folder): {**summary(run.read(COLUMNS)).to_dict(), **checked}}
    assert "A title" in (tmp_path / "elsewhere" / "report.html").read_text(encoding="utf-8")


def test_no_run_is_named(tmp_path: Path) -> None:
    with pytest.raises(RecordError, match=r"no run in .*; make one with: patchcleanser certify"):
        raise typed(tmp_path).exception or AssertionError


def test_a_damaged_shard_is_named(make_run: MakeRun) -> None:
    run = make_run()
    run.shard(1).write_bytes(b"PAR1 but no more")
    with pytest.raises(RecordError, match=r"rows-00001.parquet is damaged .* delete it and run the same command again"):
        raise typed(run.folder).exception or AssertionError


def test_what_was_typed_relative_is_printed_relative(make_run: MakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = make_run("sweep/a"), make_run("sweep/b", masks=3)
    monkeypatch.chdir(first.folder.parent.parent)
    assert typed("sweep").stdout.startswith("wrote sweep/report/report.html\n")
    assert typed("sweep/a").stdout.startswith("wrote sweep/a/report/report.html\nrun digest of sweep/a: ")
    written = f"wrote {second.folder.parent / 'report' / 'report.html'}\n"
    assert typed(second.folder, "sweep/a").stdout.startswith(written)


def test_batches_that_come_while_a_report_is_made_count_nowhere(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run()
    hidden = run.folder / "later"
    run.shard(1).rename(hidden)

    def write(*runs: Any, **options: Any) -> Path:
        page = write_report(*runs, **options)
        hidden.rename(run.shard(1))  # the job goes on
        return page

    monkeypatch.setattr(reports, "write_report", write)
    done = typed(run.folder, "--json")
    assert "8 of 24 images missing" in done.stderr
    assert json.loads(done.stdout)[str(run.folder)]["images"] == 16
    assert "8 of 24 images" in (run.folder / "report" / "report.html").read_text(encoding="utf-8")


def test_runs_left_out_and_not_finished_are_named(make_run: MakeRun, tmp_path: Path) -> None:
    make_run("sweep/whole")
    empty, half = make_run("sweep/empty"), make_run("sweep/half", masks=3)
    cut = make_run("sweep/cut").folder / "manifest.json"
    cut.write_text("{")
    half.shard(1).unlink()
    for batch in range(3):
        empty.shard(batch).unlink()
    lines = typed(tmp_path / "sweep").stderr.splitlines()
    again = "go on with: patchcleanser certify …"
    assert lines.pop(0).startswith(f"left out: {cut} is damaged (")
    assert lines == [
        f"left out: {empty.folder}, it holds no rows yet; {again}",
        f"not finished: {half.folder}, 8 of 24 images missing; {again}",
    ]
