"""Runs on disk: whole or not there, one job to a folder, one writer at a time."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from pyarrow import parquet

from patchcleanser.core.geometry import Window
from patchcleanser.core.threats import Threat
from patchcleanser.errors import DataError, RecordError
from patchcleanser.records.columns import SCHEMA
from patchcleanser.records.metrics import Proportion, per_class, summary
from patchcleanser.records.provenance import write_manifest
from patchcleanser.records.run import Run, find_runs

JOB: dict[str, Any] = {
    "classifier": "abc",
    "threat": Threat.square(5).to_dict(),
    "masks": [3, 3],
    "stride": None,
    "precision": "exact",
    "table": False,
}


def row(index: int, **facts: Any) -> dict[str, Any]:
    base = {"index": index, "id": f"{index}.png", "label": 1, "undefended": 1, "answer": 1, "case": "agreed"}
    return {**base, "certified": True, "row_certified": True, "classifications": 9, "seconds": 0.5, **facts}


def made_before(folder: Path) -> Run:
    """The run as an older version wrote it: without checksums."""
    path = folder / "manifest.json"
    content = json.loads(path.read_text())
    path.write_text(json.dumps({name: content[name] for name in content if name not in ("columns", "checksum")}))
    for shard in folder.glob("rows-*.parquet"):
        parquet.write_table(parquet.read_table(shard).replace_schema_metadata(None), shard)
    return Run.open(folder)


def begin(folder: Path, job: dict[str, Any] = JOB, images: int = 5, batch: int = 2) -> Run:
    return Run.begin(folder, job, images=images, batch=batch, metadata={})


def test_a_run_knows_which_batches_are_missing_and_reads_rows_in_order(tmp_path: Path) -> None:
    run = begin(tmp_path)
    assert run.missing() == [0, 1, 2]
    assert repr(run) == f"<Run {tmp_path}: certify, 5x5 patch, 5 images>"
    run.write(2, [row(4)])
    run.write(0, [row(0), row(1)])
    assert begin(tmp_path).missing() == [1]
    assert run.read(["index"])["index"].to_pylist() == [0, 1, 4]
    run.write(1, [row(2), row(3)])
    assert Run.open(tmp_path).finished
    assert run.read().schema.names == SCHEMA.names


def test_a_folder_of_another_job_is_refused_and_the_difference_named(tmp_path: Path) -> None:
    begin(tmp_path)
    with pytest.raises(RecordError, match=r"another job; it differs in classifier \(abc, now xyz\); use another"):
        begin(tmp_path, {**JOB, "classifier": "xyz"})


def test_a_run_goes_on_with_the_batches_it_began_with(tmp_path: Path) -> None:
    begin(tmp_path, batch=2)
    assert begin(tmp_path, batch=100).batch == 2


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "damaged"),
        ("{", "damaged"),
        ("[]", "damaged"),
        (json.dumps({"format": 99}), "format 99"),
        (json.dumps({"format": 1, "key": "0", "job": {}, "images": 1, "batch": 1, "about": {}}), "changed by hand"),
    ],
)
def test_a_damaged_manifest_is_named(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "manifest.json").write_text(content)
    with pytest.raises(RecordError, match=message):
        Run.open(tmp_path)


def test_a_damaged_shard_is_named_with_what_to_do(tmp_path: Path) -> None:
    run = begin(tmp_path)
    run.write(0, [row(0), row(1)])
    run.shard(0).write_bytes(run.shard(0).read_bytes()[:-20])
    with pytest.raises(RecordError, match=r"rows-00000.parquet is damaged .* delete it and run the same"):
        run.read()


def test_rows_of_an_older_version_are_read_beside_new_ones(tmp_path: Path) -> None:
    begin(tmp_path).write(0, [row(0), row(1)])
    run = made_before(tmp_path)
    parquet.write_table(parquet.read_table(run.shard(0)).drop_columns(["caught"]), run.shard(0))
    run.write(1, [row(2, audited=4, caught=1), row(3)])
    assert run.read(["index", "caught"]).to_pydict() == {"index": [0, 1, 2, 3], "caught": [None, None, 1, None]}
    assert run.read().column_names == SCHEMA.names


def test_rows_without_a_manifest_are_not_taken_for_ours(tmp_path: Path) -> None:
    begin(tmp_path).write(0, [row(0), row(1)])
    (tmp_path / "manifest.json").unlink()
    with pytest.raises(RecordError, match=r"holds rows but no manifest.json, and none of them belongs to this job"):
        begin(tmp_path, {**JOB, "classifier": "xyz"})


@pytest.mark.parametrize("names", [["cat/1.png", "dog/2.png"], ["notes.txt"], ["sweep/manifest.json"]])
def test_a_folder_of_other_files_is_refused_and_left_as_it_is(tmp_path: Path, names: list[str]) -> None:
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    files = sorted(tmp_path.rglob("*"))
    first = names[0].split("/")[0]
    with pytest.raises(RecordError, match=f"is not empty and holds no run to continue, but {first}.*; use"):
        begin(tmp_path)
    assert sorted(tmp_path.rglob("*")) == files


def test_a_folder_with_nothing_but_leftovers_of_a_run_is_taken(tmp_path: Path) -> None:
    (tmp_path / "gallery").mkdir()
    for name in ("lock", "gallery/0.png", ".rows-00000.parquet.abc", ".DS_Store"):
        (tmp_path / name).touch()
    assert begin(tmp_path).missing() == [0, 1, 2]


def test_a_run_that_lost_its_manifest_goes_on_beside_other_files(tmp_path: Path) -> None:
    begin(tmp_path).write(0, [row(0), row(1)])
    (tmp_path / "manifest.json").unlink()
    (tmp_path / "notes.txt").touch()
    assert begin(tmp_path).missing() == [1, 2]


def test_only_one_process_works_on_a_run_and_its_death_frees_the_folder(tmp_path: Path) -> None:
    run = begin(tmp_path)
    hold = (
        "import sys, time; from patchcleanser.records.run import Run\n"
        "with Run.open(sys.argv[1]).locked(): print('held', flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", hold, str(tmp_path)], stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        other.stdout.readline()
        with pytest.raises(RecordError, match="another process is working on"), run.locked():
            pass
        other.kill()
        other.wait()
    with run.locked():
        pass


def test_a_folder_that_another_job_began_meanwhile_is_not_written_to(tmp_path: Path) -> None:
    run = begin(tmp_path)
    (tmp_path / "manifest.json").unlink()
    begin(tmp_path, {**JOB, "classifier": "xyz"})  # both were about to begin, and the other wrote last
    with pytest.raises(RecordError, match="taken by another run meanwhile"), run.locked():
        pass
    with Run.open(tmp_path).locked():  # and the lock is free again
        pass


def test_the_same_job_begun_meanwhile_in_other_batches_is_not_mixed_with_ours(tmp_path: Path) -> None:
    """Shards are named by their batch: of two sizes, some images would have two rows and others none."""
    run = begin(tmp_path)
    (tmp_path / "manifest.json").unlink()
    Run.begin(tmp_path, JOB, images=run.images, batch=run.batch + 1, metadata={})
    with pytest.raises(RecordError, match="taken by another run meanwhile"), run.locked():
        pass


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(DataError, match="cannot write"):
        begin(tmp_path / "run")


def test_a_full_disk_loses_only_the_batch_in_flight(tmp_path: Path) -> None:
    run = begin(tmp_path)
    run.write(0, [row(0), row(1)])
    full = (
        "import sys, resource; from patchcleanser.records.run import Run\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))\n"
        "import signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "run = Run.open(sys.argv[1])\n"
        "run.write(1, [{**row, 'index': row['index'] + 2, 'id': 'x' * 5000} for row in run.read().to_pylist()])"
    )
    done = subprocess.run([sys.executable, "-c", full, str(tmp_path)], capture_output=True, text=True, check=False)
    assert "DataError: cannot write" in done.stderr
    assert run.missing() == [1, 2]
    assert len(run.read()) == 2
    assert not [p for p in tmp_path.iterdir() if p.name.startswith(".rows")]


def test_runs_are_found_below_a_folder(tmp_path: Path) -> None:
    begin(tmp_path / "a")
    begin(tmp_path / "b" / "c")
    runs, left_out = find_runs([tmp_path])
    assert [run.folder.name for run in runs] == ["a", "c"]
    assert left_out == []
    assert len(find_runs([tmp_path, tmp_path / "a"])[0]) == 2
    with pytest.raises(RecordError, match=r"holds no manifest.json; name one of those below it, such as .*a$"):
        Run.open(tmp_path)
    with pytest.raises(RecordError, match="make one with: patchcleanser certify"):
        find_runs([tmp_path / "nothing"])


def test_a_run_that_cannot_be_used_does_not_cost_the_others_beside_it(tmp_path: Path) -> None:
    begin(tmp_path / "good")
    (tmp_path / "cut").mkdir()
    (tmp_path / "cut" / "manifest.json").write_text("{")
    write_manifest(tmp_path / "kind", {"job": {**JOB, "kind": "dance"}, "images": 5, "batch": 2, "columns": {}}, {})
    runs, left_out = find_runs([tmp_path])
    assert [run.folder.name for run in runs] == ["good"]
    assert [text.partition(tmp_path.name)[2].split(" (")[0] for text in left_out] == [
        "/cut/manifest.json is damaged",
        "/kind holds a run of kind 'dance'; there are certify, attack, detect, multilabel, multilabel-attack",
    ]
    with pytest.raises(RecordError, match=r"cut/manifest\.json is damaged"):
        find_runs([tmp_path / "good", tmp_path / "cut"])


def test_a_run_in_the_folder_of_another_is_named_unless_it_is_chosen(tmp_path: Path) -> None:
    begin(tmp_path)
    begin(tmp_path / "inner")
    runs, left_out = find_runs([tmp_path])
    assert [run.folder for run in runs] == [tmp_path]
    assert left_out == [f"{tmp_path / 'inner'} lies in the folder of another run; name it, too"]
    assert find_runs([tmp_path, tmp_path / "inner"])[1] == []


@pytest.mark.parametrize(
    "threat",
    [
        Threat.square(5),
        Threat.share(0.0244140625, grid="input"),
        Threat.any_rectangle(502),
        Threat.any_rectangle(share=0.01, count=2),
        Threat.rectangle(3, 9, region=Window(1, 2, 20, 21)),
    ],
)
def test_threats_come_back_from_a_manifest_as_they_were(threat: Threat) -> None:
    assert Threat.from_dict(json.loads(json.dumps(threat.to_dict()))) == threat


def test_a_summary_counts_what_was_answered_and_only_that(tmp_path: Path) -> None:
    run = begin(tmp_path, images=4, batch=4)
    wrong = row(1, answer=0, certified=False, row_certified=False, case="majority")
    skipped = {"index": 3, "id": "3.png", "label": 1, "skipped": "cannot decode"}
    run.write(0, [row(0), wrong, row(2, undefended=0, certified=False), skipped])
    result = summary(run.read())
    assert (result.images, result.skipped) == (3, 1)
    assert {name: share.count for name, share in result.shares.items()} == {
        "undefended": 2,
        "clean": 2,
        "certified": 1,
        "row_certified": 2,
    }
    assert result.cases == {"agreed": 2, "majority": 1}
    assert per_class(run.read())[1]["clean"] == Proportion(2, 3)
    twice = result + result
    assert twice.shares["clean"] == Proportion(4, 6)


def test_detection_has_shares_of_its_own(tmp_path: Path) -> None:
    run = begin(tmp_path, images=2, batch=2)
    base = {"certified": None, "row_certified": None, "case": None}
    rows = [
        row(0, alert=False, detection_certified=True, **base),
        row(1, alert=True, detection_certified=False, **base),
    ]
    run.write(0, rows)
    shares = summary(run.read()).shares
    assert "certified" not in shares
    assert (shares["clean"].count, shares["alerts"].count, shares["detection_certified"].count) == (1, 1, 1)


@pytest.mark.parametrize(
    ("count", "total", "low", "high"), [(0, 10, 0.0, 27.75), (10, 10, 72.25, 100.0), (50, 100, 40.38, 59.62)]
)
def test_intervals_are_wilsons(count: int, total: int, low: float, high: float) -> None:
    assert Proportion(count, total).interval == pytest.approx((low, high), abs=0.01)


def test_a_run_gives_its_accuracies_and_a_data_frame(tmp_path: Path) -> None:
    run = begin(tmp_path, images=2)
    run.write(0, [row(0), row(1)])
    assert run.summary() == summary(run.read())
    frame = run.to_pandas(["index", "label"])
    assert list(frame.columns) == ["index", "label"]
    assert frame["index"].tolist() == [0, 1]


def test_a_data_frame_without_pandas_says_what_to_install(tmp_path: Path) -> None:
    run = begin(tmp_path, images=2)
    run.write(0, [row(0), row(1)])
    code = "import sys; sys.modules['pandas'] = None; from patchcleanser import Run; Run.open(sys.argv[1]).to_pandas()"
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=False)
    assert "pandas is not installed; run: pip install pandas" in done.stderr


@pytest.mark.parametrize(
    ("columns", "words"),
    [
        (["certifed"], "no column 'certifed'; .*did you mean certified"),
        ("label", r"columns are a list of names, as \['label'\]"),
    ],
)
@pytest.mark.parametrize("rows", [0, 2])
def test_a_column_that_is_none_is_refused(columns: Any, words: str, rows: int, tmp_path: Path) -> None:
    run = begin(tmp_path)
    if rows:
        run.write(0, [row(0), row(1)])
    for read in (run.read, run.to_pandas):
        with pytest.raises(RecordError, match=words):
            read(columns)


def test_a_file_is_no_run(tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text("x = 1")
    with pytest.raises(RecordError, match=r"net\.py is a file, not the folder of a run"):
        Run.open(tmp_path / "net.py")


def test_summaries_of_the_same_rows_are_equal_however_long_they_took(tmp_path: Path) -> None:
    run = begin(tmp_path)
    run.write(0, [row(0), row(1)])
    rows = run.read()
    slower = rows.set_column(rows.schema.get_field_index("seconds"), "seconds", [[9.0, 9.0]])
    assert summary(rows) == summary(slower)
    assert summary(rows) != summary(rows.slice(1))
    assert float(summary(rows).shares["certified"]) == 1
