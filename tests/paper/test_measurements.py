"""Measurements: merged with those of other machines, and shown beside the paper's numbers."""

from __future__ import annotations

from pathlib import Path

import pytest

from patchcleanser.errors import RecordError
from patchcleanser.paper import EXPERIMENTS, Measurement, PaperRow
from patchcleanser.paper.measurements import collect, merge_measurements, read_measurements
from patchcleanser.paper.models import usual_patch
from patchcleanser.paper.pages import Section, results_page, why_different, write_page
from patchcleanser.paper.runners import StoredRunner
from patchcleanser.records.derive import verdicts
from patchcleanser.records.metrics import Proportion
from patchcleanser.records.run import Run

REPOSITORY = Path(__file__).parents[2]
TABLE2 = EXPERIMENTS["table2"]
ROW = next(row for row in TABLE2.rows if row.spec == usual_patch("tiny"))


def measurement(certified: int, images: int, device: str = "cpu") -> Measurement:
    shares = {"clean": Proportion(images, images), "certified": Proportion(certified, images)}
    origin = {"device": device, "seed": 0, "command": "patchcleanser reproduce table2", "versions": {"torch": "2.5"}}
    return Measurement(shares | {"seconds": 0.5}, images, origin)


def test_measurements_survive_the_file(tmp_path: Path) -> None:
    merge_measurements(TABLE2, {ROW.key: measurement(60, 100)}, tmp_path)
    assert read_measurements(tmp_path, "table2") == {ROW.key: measurement(60, 100)}
    assert read_measurements(tmp_path, "table3") == {}


def test_the_measurement_from_more_images_stays_and_of_equals_the_newer(tmp_path: Path) -> None:
    for certified, images, want in ((60, 100, 60), (6, 10, 60), (70, 100, 70), (700, 1000, 700)):
        merged = merge_measurements(TABLE2, {ROW.key: measurement(certified, images)}, tmp_path)
        share = merged[ROW.key].values["certified"]
        assert isinstance(share, Proportion)
        assert share.count == want
    merged = merge_measurements(TABLE2, {"gone|x": measurement(1, 9999)}, tmp_path)  # no longer declared
    assert list(merged) == [ROW.key]


def test_damaged_measurements_are_named(tmp_path: Path) -> None:
    (tmp_path / "table2.json").write_text('{"findings": {"a": 1}}')
    with pytest.raises(RecordError, match=r"table2\.json is damaged .* delete it and reproduce again"):
        read_measurements(tmp_path, "table2")


def test_the_table_lays_ours_with_an_interval_beside_the_paper_s_with_a_reason(tmp_path: Path) -> None:
    section = Section(TABLE2, {ROW.key: measurement(60, 100)})
    section.write(tmp_path)
    text = (tmp_path / "tables" / "table2.md").read_text()
    assert "| tiny | CIFAR-10 | 97.8 | 100.0 (96.3–100.0) | 78.8 | 60.0 (50.2–69.1) | 100 |" in text
    assert "It has 1.4 M parameters and saw only CIFAR-10" in text
    assert "100 images instead of 10,000." in text
    rows = (tmp_path / "tables" / "table2.csv").read_text().splitlines()
    assert "paper_certified" in rows[0]
    assert "patchcleanser reproduce table2" in rows[1]  # where it came from


@pytest.mark.parametrize("row", [row for e in EXPERIMENTS.values() for row in e.rows][::7])
def test_every_row_has_one_sentence_on_why_it_differs(row: PaperRow) -> None:
    text = why_different(row, measurement(1, 10))
    assert text.endswith(".")
    assert text.count(". ") == 0
    assert text[0] == text[0].upper()


def test_the_page_needs_nothing_else_and_says_what_is_not_measured(tmp_path: Path) -> None:
    page = write_page([Section(TABLE2, {ROW.key: measurement(60, 100)})], tmp_path).read_text()
    assert "src=" not in page
    assert "http" not in page.replace("http://www.w3.org", "")
    assert "Table 2: Clean and certified accuracy" in page
    assert f"{len(TABLE2.rows) - 1} of {len(TABLE2.rows)} lines" in page
    assert "<code>patchcleanser reproduce table2</code>" in page


def test_pages_tell_each_reason_once_and_number_it() -> None:
    rows = [row for row in TABLE2.rows if row.spec.model in ("tiny", "resnet")]
    section = Section(TABLE2, {row.key: measurement(60, 100) for row in rows})
    table, reasons = section.numbered
    assert [reasons[int(str(row["why"])) - 1] for row in table.rows] == [row["why"] for row in section.table.rows]
    assert len(reasons) == len(set(reasons)) < len(table.rows)


def test_the_documentation_s_page_is_the_one_that_the_results_give() -> None:
    written = (REPOSITORY / "docs" / "results" / "paper.md").read_text(encoding="utf-8")
    assert written == results_page(REPOSITORY / "results" / "reproduce"), (
        "write it anew: patchcleanser reproduce --page docs/results/paper.md --out results/reproduce"
    )


STORED = "table2 table4 table5 table6 table7 figure4 figure5 figure6 figure8 figure9 figure10 figure22"


@pytest.mark.parametrize("name", STORED.split())
def test_measurements_follow_from_the_rows_beside_them(name: str) -> None:
    results = REPOSITORY / "results" / "reproduce"
    experiment, runner = EXPERIMENTS[name], StoredRunner(results / "rows")
    again, _ = collect(experiment, {spec: runner.run(spec) for spec in experiment.specs}, None)
    committed = read_measurements(results, name)
    same = [key for key, entry in again.items() if committed[key].origin == entry.origin]
    assert same  # others were measured since, elsewhere or on more images
    for key in same:
        assert committed[key].to_dict()["values"] == again[key].to_dict()["values"]


def test_rows_without_their_tables_say_so_where_tables_are_asked_for() -> None:
    rows = REPOSITORY / "results" / "reproduce" / "rows"
    with pytest.raises(RecordError, match="holds no two-mask tables"):
        verdicts(Run.open(rows / "resnet-cifar10-5-source-6x6-1000-cuda-fast"), "challenger-masking")
