"""Runs whose rows or manifest are not as they were written: refused by name, and easily repaired."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from patchcleanser.core.threats import Threat
from patchcleanser.errors import RecordError
from patchcleanser.records.columns import SCHEMA
from patchcleanser.records.run import Row, Run
from patchcleanser.records.shards import checksum, write_shard

JOB: dict[str, Any] = {"threat": Threat.square(5).to_dict(), "masks": [2, 2], "stride": None, "table": True}
IMAGES, BATCH = 10, 4


def row(index: int) -> Row:
    """A certified image, and every third one that is not."""
    labels = [1, 1, 1, 1, 1, 1, 1, 1, 1, 1 if index % 3 else 2]
    return {
        **{"index": index, "id": f"{index}.png", "label": 1, "height": 8, "width": 8, "undefended": 1, "answer": 1},
        **{"one_mask_labels": labels[:4], "one_mask_margins": [0.5, float("nan"), 1.0, 2.0], "table": labels},
        **{"one_mask_confidences": [0.5, 0.6, 0.7, 0.8], "case": "agreed", "certified": bool(index % 3)},
        **{"row_certified": True, "margin": 0.5, "classifications": 11, "seconds": 0.5, "audited": 3, "caught": 0},
    }


def rows_of(run: Run, batch: int) -> list[Row]:
    return [row(index) for index in run.indices(batch)]


def begin(folder: Path) -> Run:
    return Run.begin(folder, JOB, images=IMAGES, batch=BATCH, metadata={})


def content(run: Run) -> str:
    """All rows; as text, since NaN is not equal to itself."""
    return str(run.read().to_pylist())


def finish(folder: Path) -> Run:
    """The same command again: what is missing is computed, and everything that is there is read."""
    run = begin(folder)
    with run.locked():
        run.read()
        for batch in run.missing():
            run.write(batch, rows_of(run, batch))
    return run


def without_checksums(folder: Path) -> Run:
    path = folder / "manifest.json"
    content = json.loads(path.read_text())
    path.write_text(json.dumps({name: content[name] for name in content if name not in ("columns", "checksum")}))
    for shard in folder.glob("rows-*.parquet"):
        parquet.write_table(parquet.read_table(shard).replace_schema_metadata(None), shard)
    return Run.open(folder)


def edit(run: Run, batch: int, change: Callable[[pa.Table], pa.Table]) -> None:
    """As somebody does who reads and writes the file with pyarrow, which keeps the header."""
    table = parquet.read_table(run.shard(batch))
    parquet.write_table(change(table).replace_schema_metadata(table.schema.metadata), run.shard(batch))


def with_values(**columns: Any) -> Callable[[pa.Table], pa.Table]:
    """Other values in the second row."""

    def change(table: pa.Table) -> pa.Table:
        rows = table.to_pylist()
        rows[1] |= columns
        return pa.Table.from_pylist(rows, schema=table.schema)

    return change


EDITS: dict[str, Callable[[pa.Table], pa.Table]] = {
    "rows dropped": lambda table: table.slice(0, 2),
    "a row doubled": lambda table: pa.concat_tables([table, table.slice(0, 1)]),
    "rows in another order": lambda table: table.take([1, 0, *range(2, len(table))]),
    "a label changed": with_values(label=2, one_mask_labels=[2] * 4, table=[2] * 10, answer=2),
    "a flag changed": with_values(row_certified=False, certified=False, table=[1] * 9 + [2]),
    "a margin changed": with_values(margin=0.75),
    "a value made null": with_values(height=None),
    "an empty list made null": with_values(failing_pair=[]),
    "a column dropped": lambda table: table.drop_columns(["margin"]),
    "a later column dropped": lambda table: table.drop_columns(["caught"]),
    "a column added": lambda table: table.append_column("more", pa.nulls(len(table), pa.int32())),
}


@pytest.mark.parametrize("change", EDITS.values(), ids=EDITS)
def test_a_changed_shard_is_refused_by_name_and_deleting_it_repairs_the_run(
    tmp_path: Path, change: Callable[[pa.Table], pa.Table]
) -> None:
    run = finish(tmp_path)
    digest, sound = run.digest, content(run)
    edit(run, 1, change)
    for read in (run.read, Run.open(tmp_path).read, lambda: finish(tmp_path), lambda: Run.open(tmp_path).digest):
        with pytest.raises(RecordError, match=r"rows-00001.parquet .*; delete it and .* compute its 4 rows anew"):
            read()
    assert len(run.read_batch(0)) == 4  # the other shards are as good as before
    run.shard(1).unlink()
    assert len(Run.open(tmp_path).read()) == 6  # not finished, which is no damage
    assert content(finish(tmp_path)) == sound
    assert Run.open(tmp_path).digest == digest


def test_a_shard_in_place_of_another_is_refused(tmp_path: Path) -> None:
    run = finish(tmp_path)
    shutil.copyfile(run.shard(0), run.shard(1))
    with pytest.raises(RecordError, match=r"rows-00001.parquet belongs elsewhere: .* indices \[0, 4\], not \[4, 8\]"):
        run.read()
    with pytest.raises(RecordError, match="holds other rows than 4 to 7, each once: 0, 1, 2, 3"):
        without_checksums(tmp_path).read()


def test_a_shard_of_another_job_is_refused(tmp_path: Path) -> None:
    run = finish(tmp_path / "a")
    other = Run.begin(tmp_path / "b", {**JOB, "classifier": "another"}, images=IMAGES, batch=BATCH, metadata={})
    other.write(1, rows_of(other, 1))
    shutil.copyfile(other.shard(1), run.shard(1))
    with pytest.raises(RecordError, match=r"rows-00001.parquet belongs elsewhere: it was written for key"):
        run.read()


def test_a_shard_of_more_batches_than_there_are_is_refused(tmp_path: Path) -> None:
    run = finish(tmp_path)
    shutil.copyfile(run.shard(0), run.shard(3))
    with pytest.raises(RecordError, match=r"rows-00003.parquet belongs to no batch: .*manifest.json has 3 batches"):
        run.read()


def test_a_shard_without_its_checksum_is_refused(tmp_path: Path) -> None:
    run = finish(tmp_path)
    parquet.write_table(parquet.read_table(run.shard(0)).replace_schema_metadata(None), run.shard(0))
    with pytest.raises(RecordError, match=r"rows-00000.parquet has no checksum"):
        run.read()


def test_all_damaged_shards_are_named_at_once(tmp_path: Path) -> None:
    run = finish(tmp_path)
    for batch in (0, 2):
        edit(run, batch, with_values(margin=9.0))
    with pytest.raises(RecordError, match=r"rows-00000.parquet does not .*; the same goes for rows-00002.parquet"):
        run.read()


def test_a_shard_that_was_read_before_is_checked_again_when_it_changes(tmp_path: Path) -> None:
    run = finish(tmp_path)
    run.read(["index"])
    edit(run, 0, with_values(margin=9.0))
    with pytest.raises(RecordError, match=r"rows-00000.parquet does not match its checksum"):
        run.read(["index"])


@pytest.mark.parametrize("seed", range(60))
def test_a_flipped_byte_is_refused_or_changes_nothing(tmp_path: Path, seed: int) -> None:
    run = finish(tmp_path)
    sound, draw, stored = content(run), random.Random(seed), bytearray(run.shard(0).read_bytes())
    stored[draw.randrange(len(stored))] ^= 1 << draw.randrange(8)
    run.shard(0).write_bytes(stored)
    try:
        outcome = content(Run.open(tmp_path))
    except RecordError as error:
        outcome = str(error)
    assert outcome == sound or outcome.startswith(str(run.shard(0)))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"batch": 5}, "does not match its checksum"),
        ({"batch": 0}, "does not match its checksum"),
        ({"images": 9}, "does not match its checksum"),
        ({"images": 10**12}, "does not match its checksum"),
        ({"columns": {}}, "does not match its checksum"),
        ({"about": []}, "its metadata"),
        ({"job": {**JOB, "masks": [6, 6]}}, "its key does not fit its job"),
        ({"job": []}, "is damaged|its key"),
    ],
    ids=str,
)
def test_a_changed_manifest_is_refused_and_deleting_it_loses_no_row(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    run = finish(tmp_path)
    digest, times = run.digest, [run.shard(batch).stat().st_mtime_ns for batch in range(3)]
    path = tmp_path / "manifest.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    for read in (Run.open, begin):
        with pytest.raises(
            RecordError, match=f"manifest.json .*({message}).*; restore it, or delete it and run the same"
        ):
            read(tmp_path)
    path.unlink()
    again = Run.begin(tmp_path, JOB, images=IMAGES, batch=100, metadata={})
    assert (again.batch, again.digest) == (BATCH, digest)
    assert times == [run.shard(batch).stat().st_mtime_ns for batch in range(3)]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"batch": 5}, "belongs to no batch"),
        ({"batch": 2}, "belongs to no batch|holds other rows"),
        ({"batch": 0}, "batch must be at least 1, got 0"),
        ({"batch": "4"}, "batch must be at least 1, got 4"),
        ({"batch": 4.0}, "batch must be at least 1, got 4.0"),
        ({"images": -1}, "images must be at least 1, got -1"),
        ({"images": 8}, "belongs to no batch"),
        ({"images": 9}, "holds other rows than 8 to 8, each once: 8, 9"),
        ({"images": 12}, "holds other rows than 8 to 11, each once: 8, 9"),
    ],
    ids=str,
)
def test_a_changed_manifest_without_a_checksum_does_not_fit_its_rows(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    finish(tmp_path)
    without_checksums(tmp_path)
    path = tmp_path / "manifest.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(RecordError, match=message):
        Run.open(tmp_path).read()


def test_a_job_says_how_many_images_its_manifest_has(tmp_path: Path) -> None:
    Run.begin(tmp_path, {**JOB, "images": IMAGES}, images=IMAGES, batch=BATCH, metadata={})
    without_checksums(tmp_path)
    path = tmp_path / "manifest.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "images": 10**12}))
    with pytest.raises(RecordError, match="it has 1000000000000 images, and its job 10"):
        Run.open(tmp_path)


def test_a_run_made_before_is_read_and_gone_on_with_and_says_that_it_is_unchecked(tmp_path: Path) -> None:
    run = finish(tmp_path)
    digest, sound = run.digest, content(run)
    run.shard(2).unlink()
    without_checksums(tmp_path)
    old = finish(tmp_path)
    assert content(old) == sound
    assert (
        old.unchecked
        == f"{tmp_path} was made before rows had checksums: they are unchecked, and a change that does "
        + ("not contradict itself would not be noticed")
    )
    assert old.digest == digest  # it follows from the rows, wherever they came from
    edit(old, 2, with_values(margin=9.0))
    with pytest.raises(
        RecordError, match=r"rows-00002.parquet does not match its checksum"
    ):  # rows made since have one
        old.read()


def test_the_digest_is_of_all_rows_and_only_of_a_finished_run(tmp_path: Path) -> None:
    run, other = finish(tmp_path / "a"), finish(tmp_path / "b")
    assert run.digest == other.digest
    other.shard(2).unlink()
    assert other.digest is None
    other.write(2, [{**row(8), "margin": 0.25}, row(9)])
    assert other.digest not in (None, run.digest)


CONTRADICTIONS: list[tuple[str, Row]] = [
    ("it has no label", {"label": None}),
    ("it has no label", {"label": -1}),
    ("it has no answer", {"answer": None}),
    ("it has no answer", {"undefended": -1}),
    ("it does not say whether it is certified", {"certified": None}),
    ("certified but not row-certified", {"row_certified": False}),
    ("certified with a wrong answer", {"answer": 2}),
    ("certified with a wrong answer", {"answer": 2, "certified": False, "table": [1] * 9 + [2]}),
    ("certified with a wrong one-mask label", {"one_mask_labels": [1, 2, 1, 1]}),
    ("certified does not follow from its table", {"certified": False}),
    ("certified does not follow from its table", {"table": [1] * 9 + [2]}),
    ("its table is shorter", {"table": [1] * 3}),
    ("its table begins with other one-mask labels", {"certified": False, "table": [1, 2] + [1] * 8}),
    ("a negative label under a mask", {"certified": False, "table": [1] * 9 + [-1]}),
    ("its one_mask_margins are not one for each mask", {"one_mask_margins": [0.5]}),
    ("a value of its one_mask_margins is out of range", {"one_mask_margins": [-0.5, 1.0, 1.0, 1.0]}),
    ("a value of its one_mask_confidences is out of range", {"one_mask_confidences": [1.5, 1.0, 1.0, 1.0]}),
    ("a negative margin", {"margin": -0.5}),
    ("it has no count of classifications", {"classifications": None}),
    ("more labels flipped than rechecked", {"rechecked": 1, "flipped": 2}),
    ("more labels caught than audited", {"audited": 1, "caught": 2}),
    ("it has no time", {"seconds": None}),
    ("detection-certified with a wrong answer or an alert", {"detection_certified": True, "alert": True}),
]


@pytest.mark.parametrize(("message", "change"), CONTRADICTIONS, ids=str)
def test_a_row_that_contradicts_itself_is_neither_written_nor_read(tmp_path: Path, message: str, change: Row) -> None:
    run = finish(tmp_path)
    rows = rows_of(run, 1)
    rows[1] |= change
    with pytest.raises(RecordError, match=f"is not written: it has a row that contradicts itself, row 5: {message}"):
        run.write(1, rows)
    assert len(run.read()) == IMAGES
    table = pa.Table.from_pylist(rows, schema=SCHEMA)
    write_shard(run.shard(1), table, run.header(1), checksum(table, run.header(1)))  # as a forger would
    with pytest.raises(RecordError, match=f"rows-00001.parquet has a row that contradicts itself, row 5: {message}"):
        run.read(["id"])
    run.shard(1).unlink()
    assert len(finish(tmp_path).read()) == IMAGES


def test_rows_of_another_batch_are_not_written(tmp_path: Path) -> None:
    run = begin(tmp_path)
    with pytest.raises(RecordError, match="is not written: it holds other rows than 0 to 3, each once: 4, 5, 6, 7"):
        run.write(0, rows_of(run, 1))
    assert run.missing() == [0, 1, 2]


def test_a_checksum_is_of_what_rows_say_and_not_of_how_a_file_stores_it(tmp_path: Path) -> None:
    run = finish(tmp_path)
    table = parquet.read_table(run.shard(0))
    ways: list[dict[str, Any]] = [
        {"compression": "none"},
        {"compression": "gzip", "version": "1.0", "data_page_version": "2.0"},
        {"use_dictionary": False, "row_group_size": 1},
        {"use_compliant_nested_type": False},
        {"store_schema": False},
    ]
    for way in ways:
        parquet.write_table(table, run.shard(0), **way)
        stored = parquet.read_schema(run.shard(0)).metadata or {}
        assert (b"patchcleanser" in stored) == way.get("store_schema", True)
        if b"patchcleanser" in stored:
            assert len(run.read()) == IMAGES
    parquet.write_table(table.select(table.column_names[::-1]), run.shard(0))
    assert run.read().column_names == SCHEMA.names
    wide = table.cast(
        pa.schema(
            [pa.field(f.name, pa.large_string() if pa.types.is_string(f.type) else f.type) for f in table.schema],
            table.schema.metadata,
        )
    )
    parquet.write_table(wide, run.shard(0))
    assert run.read().schema.equals(SCHEMA)


def test_equal_numbers_have_equal_checksums_and_others_do_not() -> None:
    def of(*values: Any, kind: pa.DataType | None = None) -> str:
        return checksum(pa.table({"a": pa.array(values, type=kind or pa.float32())}), {})

    quiet, other = np.array([0x7FC00000, 0x7FC00001], dtype=np.uint32).view(np.float32)
    assert of(quiet) == of(other)
    assert of(0.0) == of(-0.0)
    assert len({of(0.0), of(None), of(np.nan), of(), of(0.0, 0.0), of(0, kind=pa.int32())}) == 6
    lists = pa.list_(pa.int32())
    strings = pa.string()
    different = [
        *(
            of(*values, kind=lists)
            for values in ([[1], [2]], [[1, 2], []], [[1, 2], None], [[1, None], [2]], [[0, 1], [2]])
        ),
        *(of(*values, kind=strings) for values in (["ab", "c"], ["a", "bc"], ["abc", None], ["abc", ""])),
    ]
    assert len(set(different)) == len(different)
    sliced = pa.table({"a": pa.array([[9], [1, 2], None], type=lists)}).slice(1)
    assert checksum(sliced, {}) == of([1, 2], None, kind=lists)


def test_the_checksum_is_the_documented_one() -> None:
    """Runs that exist must stay readable: whoever changes this number changes the format."""
    columns = [
        ("index", pa.int64()),
        ("id", pa.string()),
        ("certified", pa.bool_()),
        ("margin", pa.float32()),
        ("table", pa.list_(pa.int32())),
    ]
    rows = [
        {"index": 0, "id": "a", "certified": True, "margin": 0.5, "table": [1, 2]},
        {"index": 1, "id": "é", "certified": None, "margin": None, "table": None},
    ]
    table = pa.Table.from_pylist(rows, schema=pa.schema(columns))
    header = {"key": "k", "images": 2, "batch": 2, "indices": [0, 2]}
    assert checksum(table, header) == "e0281199d6af9d7600422658e95fe76e1bb3cd0172554238a033979e29d8cee2"


@pytest.mark.parametrize("name", ["lock", "rows-00001.parquet", "manifest.json"])
def test_nothing_is_written_through_a_symbolic_link(tmp_path: Path, name: str) -> None:
    run, target = finish(tmp_path / "run"), tmp_path / "elsewhere"
    (run.folder / name).unlink(missing_ok=True)
    if name == "lock":
        target.write_text("precious")
    (run.folder / name).symlink_to(target)
    with pytest.raises(RecordError, match=f"{name} is a symbolic link, and nothing is written through links"):
        finish(run.folder)
    assert target.read_text() == "precious" if name == "lock" else not target.exists()
    (run.folder / name).unlink()
    assert len(finish(run.folder).read()) == IMAGES


def test_rows_and_manifests_behind_symbolic_links_are_read_and_checked(tmp_path: Path) -> None:
    run = finish(tmp_path / "run")
    for name in ("rows-00001.parquet", "manifest.json"):
        shutil.move(run.folder / name, tmp_path / name)
        (run.folder / name).symlink_to(tmp_path / name)
    assert len(finish(run.folder).read()) == IMAGES
    edit(run, 1, with_values(margin=9.0))
    with pytest.raises(RecordError, match=r"rows-00001.parquet does not match its checksum"):
        Run.open(run.folder).read()
