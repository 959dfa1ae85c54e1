"""Two runs on the same images are compared image by image, or the report says why not."""

from __future__ import annotations

import csv
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from patchcleanser.records.metrics import mcnemar_p_value
from patchcleanser.records.run import Row, Run
from patchcleanser.reports import write_report
from patchcleanser.reports.comparison import Comparison, compare
from patchcleanser.reports.run_results import RunResult, read_result

MakeRun = Callable[..., Run]


def unlinked(html: str) -> str:
    """A page without the links to its explanations of words."""
    return re.sub(r'<a href="#word-[^"]*">(.*?)</a>', r"\1", html)


def changed(run: Run, change: Callable[[Row], Any], **job: object) -> Run:
    """A run of another job on the same images, with other rows."""
    folder = run.folder.with_name(f"{run.folder.name}-changed")
    again = Run.begin(folder, {**run.job, **job}, images=run.images, batch=run.batch, metadata=run.metadata)
    for batch in range(run.batches):
        rows = run.read_batch(batch).to_pylist()
        for row in rows:
            change(row)
        again.write(batch, rows)
    return again


def lost(row: Row) -> None:
    """Every third image is no longer certified, every sixth answered wrongly."""
    if row["index"] % 3 == 0:
        row |= {"certified": False, "row_certified": False, "weakest": [1, 1, 2, 2]}
    if row["index"] % 6 == 0:
        row |= {"answer": (row["label"] + 1) % 3, "case": "majority", "deciding_mask": None}


def pair(first: Run, second: Run) -> tuple[RunResult, RunResult]:
    results = read_result(first, None), read_result(second, None)
    assert results[0] is not None
    assert results[1] is not None
    return results[0], results[1]


def compared(first: Run, second: Run, each: int = 4) -> Comparison | str:
    return compare(*pair(first, second), ("A", "B"), each)


def test_shares_and_p_values_are_those_of_the_rows(make_run: MakeRun) -> None:
    run = make_run(images=40, table=False)
    other = changed(run, lost)
    comparison = compared(run, other)
    assert isinstance(comparison, Comparison)
    rows = list(zip(run.read().to_pylist(), other.read().to_pylist(), strict=True))
    only = {
        "Certified": [sum(a["certified"] and not b["certified"] for a, b in rows), 0],
        "Correct without an attack": [sum(a["answer"] == a["label"] != b["answer"] for a, b in rows), 0],
    }
    measures = {row["measure"]: row for row in comparison.measures.rows}
    assert set(measures) == set(only)
    for name, (first, second) in only.items():
        assert first > 0
        assert (measures[name]["only_first"], measures[name]["only_second"]) == (first, second)
        assert float(str(measures[name]["p_value"])) == pytest.approx(mcnemar_p_value(first, second), rel=0.05)


def test_the_images_that_differ_are_listed_with_both_answers(make_run: MakeRun, tmp_path: Path) -> None:
    run = make_run(images=40, table=False)
    other = changed(run, lost)
    page = write_report([(run, None), (other, None)], tmp_path / "out").read_text(encoding="utf-8")
    with (tmp_path / "out" / "tables" / "comparison-images.csv").open(encoding="utf-8", newline="") as file:
        listed = {line["image"] for line in csv.DictReader(file)}
    rows = zip(run.read().to_pylist(), other.read().to_pylist(), strict=True)
    right = [[(row["certified"], row["answer"] == row["label"]) for row in each] for each in rows]
    assert listed == {f"image {i}" for i, (a, b) in enumerate(right) if a != b}
    assert "McNemar's exact test" in page
    assert 'href="#compared"' in page


def test_pictures_show_what_the_run_that_fails_cannot_prove(make_run: MakeRun) -> None:
    run = make_run(images=40, table=False)
    comparison = compared(run, changed(run, lost))  # only the first run saved pictures
    assert isinstance(comparison, Comparison)
    side = comparison.gallery["Certified only with A"]
    assert len(side.pictures) == 4
    assert side.images == comparison.measures.rows[0]["only_first"] != 4
    assert side.answered_by == "B"
    assert all(picture.patches and picture.margin is None for picture in side.pictures)
    assert "Certified only with B" not in comparison.gallery
    without = compared(run, run, each=0)
    assert isinstance(without, Comparison)
    assert without.gallery == {}


def test_the_headline_of_two_runs_counts_the_images_that_both_have(make_run: MakeRun, tmp_path: Path) -> None:
    run = make_run(images=40, table=False)
    other = changed(run, lost, defense="challenger-masking")
    run.shard(0).unlink()
    page = write_report([(run, None), (other, None)], tmp_path / "out").read_text(encoding="utf-8")
    certified = [{row["id"]: row["certified"] for row in each.read().to_pylist()} for each in (run, other)]
    common = certified[0].keys() & certified[1].keys()
    first, second = (100 * sum(each[name] for name in common) / len(common) for each in certified)
    everywhere = 100 * sum(certified[1].values()) / len(certified[1])
    assert len(common) == 32
    assert f"{second:.1f}" != f"{everywhere:.1f}"
    assert (
        f"{second:.1f}% to {first:.1f}% of the images certified against any 2×2 px patch, depending on the defense, "
        "on 32 common images; the difference " in page
    )


@pytest.mark.parametrize(("lost_images", "verdict"), [(3, "may be chance"), (20, "is significant")])
def test_the_headline_of_two_runs_says_whether_their_difference_is_significant(
    make_run: MakeRun, tmp_path: Path, lost_images: int, verdict: str
) -> None:
    def lose(row: Row) -> None:
        if row["index"] < lost_images:
            row |= {"certified": False, "row_certified": False, "weakest": [1, 1, 2, 2]}

    run = make_run(images=40, table=False)
    other = changed(run, lose, defense="challenger-masking")
    page = write_report([(run, None), (other, None)], tmp_path / "out").read_text(encoding="utf-8")
    assert f"; the difference {verdict} (p = " in page


def test_each_picture_names_the_run_that_answered(make_run: MakeRun, tmp_path: Path) -> None:
    run = make_run(images=40, table=False)
    other = changed(run, lost, defense="challenger-masking")
    page = unlinked(write_report([(run, None), (other, None)], tmp_path / "out").read_text(encoding="utf-8"))
    assert "These pictures are of one run: double-masking." in page
    compared = page.split('id="compared"')[1].split("</section>")[0]
    assert compared.count("defended with challenger masking: ") == compared.count("<figure") > 0


def test_two_runs_say_what_each_costs(make_run: MakeRun, tmp_path: Path) -> None:
    runs = [make_run(f"{masks}", masks=masks, table=False) for masks in (2, 3)]
    page = unlinked(write_report([(run, None) for run in runs], tmp_path / "out").read_text(encoding="utf-8"))
    assert "Certified at 10 instead of 45 classifications an image." in page
    results = page.split('id="results"')[1].split("</section>")[0]
    assert "Classifications per image" in results
    assert "45.0" in results
    both = [runs[0], make_run("detects", detects=True)]
    other = write_report([(run, None) for run in both], tmp_path / "out").read_text(encoding="utf-8")
    assert "classifications an image." not in unlinked(other), "which prove different things"
    same = write_report([(runs[0], None), (changed(runs[0], dict), None)], tmp_path / "out")
    assert "classifications an image." not in unlinked(same.read_text(encoding="utf-8"))


def test_unfinished_runs_are_compared_on_what_both_have_done(make_run: MakeRun) -> None:
    run = make_run(table=False)
    other = changed(run, lost)
    run.shard(0).unlink()
    other.shard(2).unlink()
    comparison = compared(run, other)
    assert isinstance(comparison, Comparison)
    assert comparison.images == 8


def test_other_images_are_not_compared_and_the_reason_is_given(make_run: MakeRun, tmp_path: Path) -> None:
    run = make_run(table=False)
    renamed = changed(make_run("b", table=False), lambda row: row.update(id=f"other {row['index']}"))
    relabelled = changed(
        make_run("c", table=False),
        lambda row: row.update(
            label=(row["label"] + 1) % 3, certified=False, row_certified=False, weakest=[1, 1, 2, 2]
        ),
    )
    twice = changed(make_run("d", table=False), lambda row: row.update(id="same"))
    assert compared(run, renamed) == "no id of an image is in both"
    reason = "the label of image 0 and 23 more differs between them, so the images are not the same"
    assert compared(run, relabelled) == reason
    assert compared(run, twice) == "several images of d-changed have the same id"
    assert compared(run, make_run("e", detects=True)) == "one of them only detects, which is another promise"
    page = write_report([(run, None), (renamed, None)], tmp_path / "out").read_text(encoding="utf-8")
    assert "The runs are not compared image by image: no id of an image is in both." in page


def test_equal_ids_in_other_data_are_pointed_out(make_run: MakeRun, tmp_path: Path) -> None:
    run = make_run(table=False)
    other = changed(run, dict, data="e" * 64)
    comparison = compared(run, other)
    assert isinstance(comparison, Comparison)
    assert comparison.only_by_id
    page = write_report([(run, None), (other, None)], tmp_path / "out").read_text(encoding="utf-8")
    assert "matched by id and label" in page
    assert "<p>None.</p>" in page


def test_attacks_on_the_same_images_are_compared(make_attack: MakeRun, tmp_path: Path) -> None:
    first = make_attack("a")
    second = make_attack("b", settings={"iterations": 200}, change=lambda row: row.update(fooled=not row["certified"]))
    comparison = compared(first, second)
    assert isinstance(comparison, Comparison)
    measures = {row["measure"]: (row["only_first"], row["only_second"]) for row in comparison.measures.rows}
    assert measures["Correct under attack"] == (4, 0)
    assert measures["Certified"] == (0, 0)
    assert write_report([(first, None), (second, None)], tmp_path / "out").is_file()
