"""A report of attacks says what was left, what was proved, and never more."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from patchcleanser.core.threats import Threat
from patchcleanser.errors import RecordError
from patchcleanser.records.metrics import Proportion
from patchcleanser.records.run import Row, Run
from patchcleanser.reports.contents import gather
from patchcleanser.reports.gallery import attack_gallery
from patchcleanser.reports.run_results import read_result

from .test_command import typed
from .test_report import Page, reported, table

MakeRun = Callable[..., Run]


def test_numbers_of_an_attack_equal_its_rows(make_attack: MakeRun, tmp_path: Path) -> None:
    run = make_attack()
    words = Page(reported(tmp_path / "out", run)).text
    rows = run.read().to_pylist()
    (line,) = table(tmp_path / "out", "attacks")
    hits = {
        "clean": [row["answer"] == row["label"] for row in rows],
        "undefended_under_attack": [not row["undefended_fooled"] for row in rows],
        "robust": [not row["fooled"] for row in rows],
        "certified": [row["certified"] for row in rows],
    }
    for name, hit in hits.items():
        share = Proportion(sum(hit), len(hit))
        assert (int(line[f"{name}_count"]), int(line[f"{name}_total"])) == (share.count, share.total)
        low, high = share.interval
        assert f"{share.percent:.1f} {low:.1f}–{high:.1f}" in words
    assert (line["model"], line["defense"], line["attack"]) == ("zoo:tiny", "double-masking", "Auto-PGD")
    assert (line["iterations"], line["locations"], line["images"], line["fooled"]) == ("100", "1", "16", "0")
    assert (float(line["queries"]), float(line["seconds"])) == (102, 0.5)
    assert "50.0% still correct under attack, no certified image fooled" in words
    assert "attacked by Auto-PGD (100 iterations, 1 location)" in words
    assert "An attack can only refute" in words
    assert "A certificate proves" in words


def test_every_format_of_the_tables_is_written(make_attack: MakeRun, tmp_path: Path) -> None:
    reported(tmp_path / "out", make_attack())
    for name in ("attacks", "empirical", "attacked-cases"):
        for ending in ("csv", "md", "tex"):
            assert (tmp_path / "out" / "tables" / f"{name}.{ending}").stat().st_size


def test_the_papers_table_has_a_column_for_each_attack_and_a_row_for_each_way_to_answer(
    make_attack: MakeRun, tmp_path: Path
) -> None:
    weak, strong = make_attack("weak"), make_attack("strong", settings={"iterations": 200, "locations": 10})
    other = make_attack("other", job={"defense": "challenger-masking"})
    adaptive = make_attack("adaptive", job={"attack": "adaptive"})
    reported(tmp_path / "out", weak, strong, other, adaptive)
    bare, double, challenger = table(tmp_path / "out", "empirical")
    once, often = "auto_pgd_100_iterations_1_location_", "auto_pgd_200_iterations_10_locations_"
    assert [row["classifier"] for row in (bare, double, challenger)] == [
        "undefended",
        "double-masking",
        "challenger masking",
    ]
    assert (bare[once], bare[often], bare["adaptive_100_iterations_1_location_"]) == ("25.0", "25.0", "")
    assert (double[once], double["adaptive_100_iterations_1_location_"]) == ("50.0", "50.0")
    assert (challenger[once], challenger[often]) == ("50.0", "")
    assert (bare["certified"], double["certified"]) == ("", "25.0")


def test_the_page_shows_the_numbers_of_an_attack_once(make_attack: MakeRun, tmp_path: Path) -> None:
    page = Page(reported(tmp_path / "out", make_attack()))
    attacked = page.text.split("Under attack")[2].split("What an attack shows")[0]
    assert attacked.count("Certified, %") == 1
    for settings in (
        "Classifier No attack, % Auto-PGD (100 iterations, 1 location), %",
        "Certified images fooled Images",
    ):
        assert settings in attacked
    assert re.search(r"double-masking 75\.0 [\d.–]+ 50\.0 [\d.–]+ 25\.0 [\d.–]+ 0 16", attacked)


def test_a_group_says_how_many_of_its_images_are_shown(make_attack: MakeRun, tmp_path: Path) -> None:
    run = make_attack(images=80)
    rows = run.read().to_pylist()
    words = Page(reported(tmp_path / "out", run)).text
    failed = sum(row["undefended"] == row["label"] == row["attacked_undefended"] for row in rows)
    assert failed > 8
    assert f"The attack failed 8 of {failed} images shown" in words
    few = Page(reported(tmp_path / "few", make_attack("few", images=8))).text
    assert "images shown" not in few


def test_no_column_of_attacks_falls_below_certified_where_no_certified_image_was_fooled(
    make_attack: MakeRun, tmp_path: Path
) -> None:
    reported(tmp_path / "out", make_attack("a"), make_attack("b", settings={"seed": 3}))
    for row in table(tmp_path / "out", "attacks"):
        assert float(row["robust"]) >= float(row["row_certified"])


def test_the_gallery_shows_before_and_after_with_labels_case_and_certificate(
    make_attack: MakeRun, tmp_path: Path
) -> None:
    html = reported(tmp_path / "out", make_attack())
    page = Page(html)
    for title in ("Recovered", "The defense was fooled", "The attack failed", "Wrong without any attack"):
        assert title in page.text
    assert "cat , certified undefended: cat → dog defended: cat → cat case II: one mask decides" in page.text
    assert "cat , not certified undefended: cat → dog defended: cat → dog (wrong) case III" in page.text
    # Each image twice, and the patch outlined once, by a dark and a bright line; and four attacked ones on top.
    assert sum(tag == "image" for tag, _ in page.tags) == 36
    outlines = [a for tag, a in page.tags if tag == "rect" and (a.get("x"), a.get("y")) == ("2", "1")]
    assert len(outlines) == 40
    bare = reported(tmp_path / "bare", Run.open(tmp_path / "attack"), pictures=False)
    assert not any(tag == "image" for tag, _ in Page(bare).tags)
    assert "--no-gallery" in bare


def test_a_recovered_image_of_case_ii_shows_a_mask_that_hides_the_patch(make_attack: MakeRun) -> None:
    run = make_attack()
    result = read_result(run, None)
    assert result is not None
    groups = attack_gallery(result, 8)
    masks = [list(mask) for mask in run.mask_set((8, 8)).masks]
    for pair in groups["recovered"]:
        assert pair.after.masks in masks
        assert any(window.contains(pair.after.outlined[0]) for window in pair.after.masks)
        assert not pair.before.masks
    assert not any(pair.after.masks for pair in groups["fooled"])


def test_a_rescue_is_among_the_first_pictures_of_a_run_beside_an_attack(
    make_run: MakeRun, make_attack: MakeRun, tmp_path: Path
) -> None:
    run, attack = make_run(table=False), make_attack()
    assert "recovered" not in gather([(run, None)]).first_pictures
    assert "recovered" in gather([(run, None), (attack, None)]).first_pictures
    top = Page(reported(tmp_path / "out", run, attack, derived=False)).text.split("zoo:tiny")[0]
    assert "Dashed: a mask that hides the patch." in top
    assert "raised the alert" not in top


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"limit": 16, "subset": "random"}, "16 images, drawn at random from the data, certified or not"),
        ({"limit": 16, "subset": "first"}, "16 images, the first of the data, certified or not"),
        ({"limit": None, "subset": "random"}, "16 images, all of the data, certified or not"),
        (None, "16 images, certified or not"),
    ],
)
def test_the_page_says_how_the_attacked_images_were_chosen(
    make_attack: MakeRun, tmp_path: Path, options: dict[str, object] | None, words: str
) -> None:
    run = make_attack(metadata={"options": {"attack": options}} if options else {})
    assert f"Attacked: {words}." in Page(reported(tmp_path / "out", run)).text


def test_a_picture_that_is_gone_is_left_out(make_attack: MakeRun, tmp_path: Path) -> None:
    run = make_attack(images=4)
    (run.folder / "gallery" / "0-attacked.png").unlink()
    (run.folder / "gallery" / "1-attacked.png").write_bytes(b"no picture")
    words = Page(reported(tmp_path / "out", run)).text
    assert "Recovered" not in words
    assert "image 2" in words


def test_detection_under_attack_has_a_table_of_its_own(make_attack: MakeRun, tmp_path: Path) -> None:
    words = Page(reported(tmp_path / "out", make_attack(detects=True))).text
    (line,) = table(tmp_path / "out", "detection-attacks")
    assert (line["never_wrong_silently"], line["alerts_under_attack"]) == ("100.0", "100.0")
    assert "100.0% never wrong silently under attack" in words
    assert "Detected" in words
    assert not (tmp_path / "out" / "tables" / "empirical.csv").exists()


def test_a_fooled_certified_image_leads_the_page_whatever_else_is_on_it(
    make_attack: MakeRun, make_run: MakeRun, tmp_path: Path
) -> None:
    def broken(row: Row) -> None:
        if row["index"] == 0:
            row |= {"fooled": True, "attacked_answer": 1}

    run = make_attack(change=broken)
    alone = Page(reported(tmp_path / "a", run)).text
    assert "1 certified image was fooled" in alone
    assert "Certified, and fooled This must not happen" in alone
    assert table(tmp_path / "a", "attacks")[0]["fooled"] == "1"
    mixed = Page(reported(tmp_path / "b", make_run(), run)).text
    assert "1 certified image was fooled in Auto-PGD (100 iterations, 1 location). That contradicts a proof" in mixed


def test_an_attack_stands_beside_the_certificates_of_the_same_model_data_and_patch(
    make_attack: MakeRun, make_run: MakeRun, tmp_path: Path
) -> None:
    certified = make_run()
    html = reported(tmp_path / "out", certified, make_attack(job={"data": "another part of the same data"}))
    words = Page(html).text
    alone = Page(reported(tmp_path / "alone", certified)).text
    assert words.startswith(alone.split("Certified frog")[0])
    assert "Under attack" in words
    assert "Before and after the attack" in words
    assert "Under attack" not in alone
    assert "is left out" not in words
    for name in ("runs", "attacks", "classes"):
        assert table(tmp_path / "out", name)


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"job": {"classifier": "e" * 64}}, "it attacks another model than"),
        ({"metadata": {"data": "imagenette"}}, "it attacks another data than"),
        ({"job": {"threat": Threat.square(3).to_dict()}}, "it attacks another patch than"),
        ({"job": {"classifier": "e" * 64}, "metadata": {"data": "svhn"}}, "it attacks another model and data than"),
    ],
)
def test_an_attack_on_something_else_is_left_out_and_named(
    make_attack: MakeRun, make_run: MakeRun, tmp_path: Path, settings: dict[str, object], why: str
) -> None:
    certified, stranger = make_run(), make_attack("stranger", **settings)
    words = Page(reported(tmp_path / "out", certified, stranger)).text
    assert f"stranger is left out: {why} the certified runs beside it; report it alone" in words
    assert "Under attack" not in words
    done = typed(certified.folder, stranger.folder, "--out", tmp_path / "out")
    assert f"left out: {stranger.folder}, {why}" in done.stderr
    assert "Under attack" in reported(tmp_path / "alone", stranger)


def test_an_attack_without_rows_is_an_error_alone_and_left_out_beside_others(
    make_attack: MakeRun, tmp_path: Path
) -> None:
    empty, full = make_attack("empty"), make_attack("full")
    for batch in range(2):
        empty.shard(batch).unlink()
    with pytest.raises(RecordError, match="empty holds no rows yet; go on with: patchcleanser attack …"):
        raise typed(empty.folder).exception or AssertionError
    assert "empty is left out: none of its images has an answer yet" in Page(reported(tmp_path / "o", empty, full)).text


def test_an_unfinished_attack_says_so(make_attack: MakeRun, tmp_path: Path) -> None:
    run = make_attack()
    run.shard(1).unlink()
    words = Page(reported(tmp_path / "out", run)).text
    assert "This run is not finished: 1 of 2 batches are missing (8 of 16 images)" in words
    assert "Go on with: patchcleanser attack …" in words
    assert "8 of 16 images missing; go on with: patchcleanser attack …" in typed(run.folder).stderr


def test_skipped_images_of_an_attack_count_nowhere_and_are_listed(make_attack: MakeRun, tmp_path: Path) -> None:
    def skip(row: Row) -> None:
        if row["index"] == 0:
            for name in set(row) - {"index", "id", "label"}:
                del row[name]
            row["skipped"] = "its true label is the target, 0"

    run = make_attack(change=skip, settings={"target": 0}, pictures=False)
    words = Page(reported(tmp_path / "out", run)).text
    assert table(tmp_path / "out", "attacks")[0]["images"] == "15"
    assert "its true label is the target, 0" in words
    assert "target cat" in words


def test_the_command_tells_the_numbers_of_both_kinds_as_json(
    make_attack: MakeRun, make_run: MakeRun, tmp_path: Path
) -> None:
    make_run("runs/certify")
    make_attack("runs/attack")
    done = typed(tmp_path / "runs", "--json")
    numbers = json.loads(done.stdout)
    attack = numbers[str(tmp_path / "runs" / "attack")]
    assert attack["robust"]["count"] == 8
    assert attack["certified_images_fooled"] == 0
    assert "certified_images_fooled" not in numbers[str(tmp_path / "runs" / "certify")]
    assert (tmp_path / "runs" / "report" / "report.html").is_file()


def test_attacks_are_named_by_what_differs(make_attack: MakeRun, tmp_path: Path) -> None:
    many = {"restarts": 3, "places": "searched", "loss": "ce", "seed": 7}
    words = Page(reported(tmp_path / "out", make_attack("a"), make_attack("b", settings=many))).text
    assert "Auto-PGD (100 iterations, 1 location) 50.0% still correct" in words
    assert "Auto-PGD (100 iterations, 1 location, 3 restarts, searched, ce loss, seed 7) 50.0% still correct" in words
    assert "Attacks: Auto-PGD (100 iterations, 1 location), Auto-PGD" in words
