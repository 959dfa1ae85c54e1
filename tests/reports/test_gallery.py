"""Pictures are those of the run, with the rectangles of its rows."""

from __future__ import annotations

import base64
import csv
import io
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from patchcleanser.records.derive import derive, unproved_corners
from patchcleanser.records.run import Row, Run
from patchcleanser.reports import contents, write_report
from patchcleanser.reports.contents import gather
from patchcleanser.reports.gallery import ATTACK_GROUPS, GROUPS, MAX_SIDE, Picture, gallery
from patchcleanser.reports.page import template_environment
from patchcleanser.reports.run_results import read_result

from .test_comparison import changed

MakeRun = Callable[..., Run]


def shown(run: Run) -> dict[str, list[Picture]]:
    result = read_result(run, None)
    assert result is not None
    return gallery(result, 100)


def test_the_patch_that_breaks_the_proof_is_drawn_where_it_lies(make_run: MakeRun, tmp_path: Path) -> None:
    run = make_run(images=40)
    rows = {row["id"]: row for row in run.read().to_pylist()}
    pictures = shown(run)["not-proved"]
    assert pictures
    for picture in pictures:
        (patch,) = picture.patches
        assert [patch.top, patch.left, patch.height, patch.width] == rows[picture.id]["weakest"]
        assert rows[picture.id]["row_certified"] is False
    html = write_report([(run, None)], tmp_path / "out").read_text(encoding="utf-8")
    first = pictures[0].patches[0]
    assert f'x="{first.left}" y="{first.top}" width="{first.width}" height="{first.height}"' in html


def test_with_tables_every_place_where_the_proof_fails_is_shaded(make_run: MakeRun, tmp_path: Path) -> None:
    run = make_run(images=40)
    result = read_result(run, derive(run))
    assert result is not None
    pictures = gallery(result, 100)["not-proved"]
    index = {row["id"]: row["index"] for row in run.read(["index", "id"]).to_pylist()}
    for picture in pictures:
        assert picture.patches == []
        shaded = np.zeros((8, 8), dtype=bool)
        for window in picture.unproved:
            shaded[window.top : window.bottom, window.left : window.right] = True
        corners = unproved_corners(run, index[picture.id])
        assert corners.any()
        assert (shaded[1:, 1:] == corners).all(), "the centre of a 2×2 patch is a pixel from its corner"
        assert sum(window.area for window in picture.unproved) == corners.sum()
    shares = [result.derived.unproved[index[picture.id]] for picture in pictures]  # type: ignore[union-attr]
    assert shares == sorted(shares)
    few = [result.derived.unproved[index[picture.id]] for picture in gallery(result, 3)["not-proved"]]  # type: ignore[union-attr]
    assert (few[0], few[-1]) == (shares[0], shares[-1]), "from the fewest unproved places to the most"
    html = write_report([(run, derive(run))], tmp_path / "out").read_text(encoding="utf-8")
    assert "Shaded: all places where the proof fails" in html
    assert "Hatched" not in html
    assert "weakest" not in html


def test_images_that_are_not_certified_can_be_ranked_or_the_page_says_how(make_run: MakeRun, tmp_path: Path) -> None:
    run = make_run()
    derived = derive(run)
    assert derived is not None
    page = write_report([(run, derived)], tmp_path / "out").read_text(encoding="utf-8")
    with (tmp_path / "out" / "tables" / "images.csv").open(encoding="utf-8", newline="") as file:
        listed = {line["image"]: line["unproved"] for line in csv.DictReader(file)}
    for row in run.read().to_pylist():
        text = listed[row["id"]]
        assert (text == "") == row["row_certified"]
        assert not text or float(text) == pytest.approx(100 * derived.unproved[row["index"]])
    assert "Unproved places, %" in page
    assert "cannot be ranked here" not in page
    plain = make_run("plain", table=False)
    page = write_report([(plain, None)], tmp_path / "out").read_text(encoding="utf-8")
    assert "cannot be ranked here" in page
    assert "Unproved places" not in page
    assert "weakest" not in page
    detection = make_run("detection", detects=True)
    assert "ranked here" not in write_report([(detection, None)], tmp_path / "out").read_text(encoding="utf-8")


def test_saved_pictures_of_small_images_stand_beside_their_rows(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = [(make_run(images=60, table=False), None)]

    def ids() -> tuple[set[str], set[str]]:
        (section,) = gather(runs).sections
        return {p.id for pictures in section.gallery.values() for p in pictures}, {*section.images.pictures}

    shown, small = ids()
    assert shown | small == {f"image {n}" for n in range(60)}
    assert not shown & small
    monkeypatch.setattr(contents, "MAX_THUMBNAILS", 300)
    assert 0 < len(ids()[1]) < 5
    large = [(make_run("large", images=24, sizes=((80, 80),), table=False), None)]
    assert not gather(large).sections[0].images.pictures


def test_a_right_answer_comes_first_and_a_wrong_one_is_marked(make_run: MakeRun, tmp_path: Path) -> None:
    def decided(row: Row, right: int) -> None:
        row |= {"case": "disagreer", "deciding_mask": 0, "certified": False, "row_certified": False}
        row |= {"weakest": [1, 1, 2, 2], "answer": (row["label"] + (row["index"] >= right)) % 3}

    run = make_run(images=40, table=False)
    for right in (0, 20):
        other = changed(run, lambda row, right=right: decided(row, right), defense=f"challenger-masking {right}")
        pictures = other.folder / "gallery"
        shutil.copytree(run.folder / "gallery", pictures)
        first = gather([(other, None)]).first_pictures["disagreer"]
        assert first.right == (right > 0)
        page = write_report([(other, None)], tmp_path / "out").read_text(encoding="utf-8")
        top = page.split('class="gallery first"')[1].split("</div>")[0]
        assert ("(wrong)" in top) == (right == 0)
        shutil.rmtree(other.folder)


def test_each_kind_shows_rows_of_that_kind(make_run: MakeRun) -> None:
    run = make_run(images=60)
    rows = {row["id"]: row for row in run.read().to_pylist()}
    groups = shown(run)
    assert all(rows[p.id]["certified"] for p in groups["certified"])
    assert all(rows[p.id]["answer"] != rows[p.id]["label"] for p in groups["wrong"])
    masks = run.mask_set((8, 8)).masks
    for picture in groups["disagreer"]:
        assert picture.masks == list(masks[rows[picture.id]["deciding_mask"]])


def test_alerts_are_shown_as_alerts(make_run: MakeRun) -> None:
    run = make_run(images=60, detects=True)
    groups = shown(run)
    assert all(p.answer == "an alert" and p.masks for p in groups["alert"])
    assert "certified" not in groups
    assert "detection-certified" in groups


def test_only_pictures_that_are_there_and_whole_are_shown(make_run: MakeRun) -> None:
    run = make_run(images=40)
    paths = sorted((run.folder / "gallery").iterdir(), key=lambda path: int(path.stem))
    for path in paths[2:]:
        path.unlink()
    paths[0].write_bytes(b"no picture")
    assert {p.id for pictures in shown(run).values() for p in pictures} <= {"image 1"}


def test_large_pictures_are_shrunk_and_keep_the_images_own_coordinates(make_run: MakeRun) -> None:
    run = make_run(images=8, sizes=((500, 400),))
    noise = np.random.default_rng(0).integers(0, 255, (500, 400, 3), dtype=np.uint8)
    for path in (run.folder / "gallery").iterdir():
        Image.fromarray(noise).save(path)
    for pictures in shown(run).values():
        for picture in pictures:
            assert (picture.height, picture.width, picture.pixelated) == (500, 400, False)
            content = base64.b64decode(picture.uri.partition(",")[2])
            assert max(Image.open(io.BytesIO(content)).size) == MAX_SIDE


def test_no_pictures_where_none_are_wanted(make_run: MakeRun, tmp_path: Path) -> None:
    html = write_report([(make_run(), None)], tmp_path / "out", pictures=False).read_text(encoding="utf-8")
    assert "data:image" not in html


def test_answers_carry_the_models_names_and_labels_the_datasets(make_run: MakeRun) -> None:
    metadata = {"classes": ["cat", "dog", "frog"], "model_classes": ["tabby", "terrier", "toad"]}
    run = make_run(images=40, metadata=metadata)
    rows = {row["id"]: row for row in run.read().to_pylist()}
    for pictures in shown(run).values():
        for picture in pictures:
            row = rows[picture.id]
            assert picture.truth == metadata["classes"][row["label"]]
            assert picture.undefended == metadata["model_classes"][row["undefended"]]
            assert picture.answer == metadata["model_classes"][row["answer"]]


def test_only_certified_images_have_a_margin(make_run: MakeRun) -> None:
    run = make_run(images=40)
    rows = {row["id"]: row for row in run.read().to_pylist()}
    everything = [picture for pictures in shown(run).values() for picture in pictures]
    assert {picture.margin is not None for picture in everything} == {True, False}
    assert all((picture.margin is not None) == rows[picture.id]["certified"] for picture in everything)


def test_only_certified_images_have_a_margin_in_the_table(make_run: MakeRun, tmp_path: Path) -> None:
    run = make_run(table=False)
    page = write_report([(run, None)], tmp_path / "out").read_text(encoding="utf-8")
    with (tmp_path / "out" / "tables" / "images.csv").open(encoding="utf-8", newline="") as file:
        listed = {line["image"]: line["margin"] != "" for line in csv.DictReader(file)}
    certified = {row["id"]: row["certified"] for row in run.read().to_pylist()}
    assert listed == certified
    assert {*listed.values()} == {True, False}
    assert "The <b>margin</b> of a certified image is the smallest difference between the two highest logits" in page


def test_no_image_is_twice_among_the_first_pictures(make_run: MakeRun, tmp_path: Path) -> None:
    run = changed(make_run(images=40, table=False), by_the_majority)
    shutil.copytree(run.folder.with_name("run") / "gallery", run.folder / "gallery")
    report = gather([(run, None)])
    first = report.first_pictures
    assert {*first} == {"not-proved", "wrong", "majority"}
    assert len({picture.id for picture in first.values()}) == 3
    assert report.sections[0].gallery["majority"][0].id in {first["not-proved"].id, first["wrong"].id}
    page = write_report([(run, None)], tmp_path / "out").read_text(encoding="utf-8")
    assert "Hatched: a patch at one of the places where the proof fails." in page
    assert "Outlined: the patch of the attack." not in page


def by_the_majority(row: Row) -> None:
    """Every image is decided by the majority, and none certified; odd ones are wrong."""
    row |= {"case": "majority", "deciding_mask": None, "certified": False, "row_certified": False}
    row |= {"weakest": [1, 1, 2, 2], "answer": (row["label"] + row["index"] % 2) % 3}


def test_long_ids_keep_their_end_and_are_whole_in_the_title(make_run: MakeRun, tmp_path: Path) -> None:
    run = make_run(ids=f"{'folder/' * 20}image-{{}}.png".format)
    html = write_report([(run, None)], tmp_path / "out").read_text(encoding="utf-8")
    assert re.search(r">…/(<wbr>folder/)+<wbr>image-0\.png</span>", html)
    assert f'title="{"folder/" * 20}image-0.png"' in html


def test_a_report_without_pictures_says_why(make_run: MakeRun, tmp_path: Path) -> None:
    run = make_run(pictures=False)

    def html(*, pictures: bool = True) -> str:
        return write_report([(run, None)], tmp_path / "out", pictures=pictures).read_text(encoding="utf-8")

    assert "No pictures: none were saved" in html()
    assert "left out of this report (<code>--no-gallery</code>)" in html(pictures=False)
    run.shard(1).unlink()
    assert "No pictures yet: they are saved when a run is finished" in html()


def test_every_group_has_a_title_and_an_explanation() -> None:
    texts = template_environment().get_template("gallery.html.jinja").module.groups  # type: ignore[attr-defined]
    assert list(texts) == [*GROUPS, *ATTACK_GROUPS]
    assert all(title and note.endswith(".") for title, note in texts.values())
