"""Findings: kept beside those of other machines, and shown beside the paper's numbers."""

from __future__ import annotations

from pathlib import Path

import pytest

from patchcleanser.errors import RecordError
from patchcleanser.paper import EXPERIMENTS, Finding
from patchcleanser.paper.collecting import collect, keep, read_found
from patchcleanser.paper.pages import results_page, section, write_page, write_section
from patchcleanser.paper.plans import usual
from patchcleanser.paper.running import Archive
from patchcleanser.paper.tabling import why
from patchcleanser.records.derive import verdicts
from patchcleanser.records.metrics import Proportion
from patchcleanser.records.run import Run

REPOSITORY = Path(__file__).parents[2]
TABLE2 = EXPERIMENTS["table2"]
LINE = next(line for line in TABLE2.lines if line.plan == usual("tiny"))


def finding(certified: int, images: int, device: str = "cpu") -> Finding:
    shares = {"clean": Proportion(images, images), "certified": Proportion(certified, images)}
    origin = {"device": device, "seed": 0, "command": "patchcleanser reproduce table2", "versions": {"torch": "2.5"}}
    return Finding(shares | {"seconds": 0.5}, images, origin)


def test_findings_survive_the_file(tmp_path: Path) -> None:
    keep(TABLE2, {LINE.key: finding(60, 100)}, tmp_path)
    assert read_found(tmp_path, "table2") == {LINE.key: finding(60, 100)}
    assert read_found(tmp_path, "table3") == {}


def test_the_finding_from_more_images_stays_and_of_equals_the_newer(tmp_path: Path) -> None:
    for certified, images, want in ((60, 100, 60), (6, 10, 60), (70, 100, 70), (700, 1000, 700)):
        kept = keep(TABLE2, {LINE.key: finding(certified, images)}, tmp_path)
        share = kept[LINE.key].values["certified"]
        assert isinstance(share, Proportion)
        assert share.count == want
    kept = keep(TABLE2, {"gone|x": finding(1, 9999)}, tmp_path)  # a line that nobody declares any more
    assert list(kept) == [LINE.key]


def test_damaged_findings_are_named(tmp_path: Path) -> None:
    (tmp_path / "table2.json").write_text('{"findings": {"a": 1}}')
    with pytest.raises(RecordError, match=r"table2\.json is damaged .* delete it and reproduce again"):
        read_found(tmp_path, "table2")


def test_the_table_lays_ours_with_an_interval_beside_the_paper_s_with_a_reason(tmp_path: Path) -> None:
    made = section(TABLE2, {LINE.key: finding(60, 100)})
    write_section(made, tmp_path)
    text = (tmp_path / "tables" / "table2.md").read_text()
    assert "| tiny | CIFAR-10 | 97.8 | 100.0 (96.3–100.0) | 78.8 | 60.0 (50.2–69.1) | 100 |" in text
    assert "It has 1.4 M parameters and saw only CIFAR-10" in text
    assert "100 images instead of 10,000." in text
    rows = (tmp_path / "tables" / "table2.csv").read_text().splitlines()
    assert "paper_certified" in rows[0]
    assert "patchcleanser reproduce table2" in rows[1]  # where it came from


@pytest.mark.parametrize("line", [line for e in EXPERIMENTS.values() for line in e.lines][::7])
def test_every_line_has_one_sentence_on_why_it_differs(line) -> None:  # type: ignore[no-untyped-def]
    words = why(line, finding(1, 10))
    assert words.endswith(".")
    assert words.count(". ") == 0
    assert words[0] == words[0].upper()


def test_the_page_needs_nothing_else_and_says_what_is_not_measured(tmp_path: Path) -> None:
    page = write_page([section(TABLE2, {LINE.key: finding(60, 100)})], tmp_path).read_text()
    assert "src=" not in page
    assert "http" not in page.replace("http://www.w3.org", "")
    assert "Table 2: Clean and certified accuracy" in page
    assert f"{len(TABLE2.lines) - 1} of {len(TABLE2.lines)} lines" in page
    assert "<code>patchcleanser reproduce table2</code>" in page


def test_pages_tell_each_reason_once_and_number_it() -> None:
    lines = [line for line in TABLE2.lines if line.plan.model in ("tiny", "resnet")]
    made = section(TABLE2, {line.key: finding(60, 100) for line in lines})
    table, notes = made.noted
    assert [notes[int(str(row["why"])) - 1] for row in table.rows] == [row["why"] for row in made.table.rows]
    assert len(notes) == len(set(notes)) < len(table.rows)


def test_the_documentation_s_page_is_the_one_that_the_results_give() -> None:
    written = (REPOSITORY / "docs" / "results" / "paper.md").read_text(encoding="utf-8")
    assert written == results_page(REPOSITORY / "results" / "reproduce"), (
        "write it anew: patchcleanser reproduce --page docs/results/paper.md --out results/reproduce"
    )


STORED = "table2 table4 table5 table6 table7 figure4 figure5 figure6 figure8 figure9 figure10 figure22"


@pytest.mark.parametrize("name", STORED.split())
def test_findings_follow_from_the_rows_beside_them(name: str) -> None:
    results = REPOSITORY / "results" / "reproduce"
    experiment, archive = EXPERIMENTS[name], Archive(results / "rows")
    again, _ = collect(experiment, {plan: archive.run(plan) for plan in experiment.plans}, None)
    kept = read_found(results, name)
    same = [key for key, found in again.items() if kept[key].origin == found.origin]
    assert same  # others were measured since, elsewhere or on more images
    for key in same:
        assert kept[key].to_json()["values"] == again[key].to_json()["values"]


def test_rows_without_their_tables_say_so_where_tables_are_asked_for() -> None:
    rows = REPOSITORY / "results" / "reproduce" / "rows"
    with pytest.raises(RecordError, match="holds no two-mask tables"):
        verdicts(Run.open(rows / "resnet-cifar10-5-source-6x6-1000-cuda-fast"), "challenger-masking")
