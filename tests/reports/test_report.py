"""A report says what the records say, of every run, safely, and alone."""

from __future__ import annotations

import csv
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from markupsafe import Markup
from matplotlib.colors import rgb2hex

from patchcleanser import reports
from patchcleanser.core.threats import Threat
from patchcleanser.data import DATASETS
from patchcleanser.errors import RecordError
from patchcleanser.records.audits import AUDIT, SIGNED, sign
from patchcleanser.records.derive import derive
from patchcleanser.records.metrics import Proportion
from patchcleanser.records.run import Run
from patchcleanser.reports import contents, write_report
from patchcleanser.reports.drawing import ROLES
from patchcleanser.reports.figures import SHADES, run_figures
from patchcleanser.reports.page_words import linked
from patchcleanser.reports.run_results import read_result

from .test_comparison import changed, unlinked

MakeRun = Callable[..., Run]


class Page(HTMLParser):
    """Tags, attributes and text of a page without links to words; fails on a tag that is not closed."""

    EMPTY = frozenset({"meta", "br", "image", "rect", "path", "use", "link", "img", "hr", "wbr"})

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.scripts: list[str] = []
        self.open: list[str] = []
        self.feed(unlinked(text))
        assert not self.open, self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in self.EMPTY:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        if tag not in self.EMPTY:
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "script":
            self.scripts.append(data)
        elif not self.open or self.open[-1] != "style":
            self.words.append(data)

    @property
    def text(self) -> str:
        return re.sub(r"\s+", " ", " ".join(self.words))


def reported(out: Path, *runs: Run, derived: bool = True, **options: object) -> str:
    page = write_report([(run, derive(run) if derived else None) for run in runs], out, **options)  # type: ignore[arg-type]
    return page.read_text(encoding="utf-8")


def table(out: Path, name: str) -> list[dict[str, str]]:
    with (out / "tables" / f"{name}.csv").open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def test_numbers_on_the_page_and_in_the_tables_equal_the_records(make_run: MakeRun, tmp_path: Path) -> None:
    run = make_run(images=40)
    html = reported(tmp_path / "out", run)
    rows = run.read().to_pylist()
    (line,) = table(tmp_path / "out", "runs")
    hits = {
        "undefended": [row["undefended"] == row["label"] for row in rows],
        "clean": [row["answer"] == row["label"] for row in rows],
        "certified": [row["certified"] for row in rows],
        "row_certified": [row["row_certified"] for row in rows],
    }
    words = Page(html).text
    for name, hit in hits.items():
        share = Proportion(sum(hit), len(hit))
        assert (int(line[f"{name}_count"]), int(line[f"{name}_total"])) == (share.count, share.total)
        assert float(line[name]) == pytest.approx(share.percent, abs=1e-3)
        low, high = share.interval
        assert f"{share.percent:.1f} % 95% interval {low:.1f}–{high:.1f} · {share.count} of {share.total}" in words
    assert float(line["classifications"]) == sum(row["classifications"] for row in rows) / len(rows)
    assert float(line["seconds"]) == pytest.approx(0.25)
    certified = sum(hits["certified"])
    assert f"{100 * certified / 40:.1f}% of the images certified against any 2×2 px patch" in words
    assert hits["certified"] == hits["row_certified"]
    assert 'id="results"' not in html, "a table of the same numbers says nothing"
    assert "Row-certified, %" not in words, "neither does a second column"


def test_row_certified_is_shown_and_explained_where_it_says_more(make_run: MakeRun, tmp_path: Path) -> None:
    run = changed(make_run(images=40, table=False), lambda row: row.update(certified=False))
    words = Page(reported(tmp_path / "out", run, derived=False)).text
    assert "Certified, % Clean, % Undefended, % Row-certified, % Classifications per image Images" in words
    assert "Row-certified proves the same under a weaker condition" in words


def test_each_class_is_counted_alone(make_run: MakeRun, tmp_path: Path) -> None:
    run = make_run(images=40)
    reported(tmp_path / "out", run)
    for line in table(tmp_path / "out", "classes"):
        rows = [row for row in run.read().to_pylist() if row["label"] == int(line["label"])]
        assert line["class"] == ("cat", "dog", "frog")[int(line["label"])]
        assert (int(line["images"]), int(line["certified_count"])) == (len(rows), sum(r["certified"] for r in rows))


def test_many_classes_show_only_the_best_and_the_worst(make_run: MakeRun, tmp_path: Path) -> None:
    run = make_run(images=400, classes=tuple(f"class-{n}" for n in range(60)), batch=100, pictures=False)
    words = Page(reported(tmp_path / "out", run)).text
    assert "The 15 classes most often certified" in words
    assert "The 15 classes least often certified" in words
    assert len(table(tmp_path / "out", "classes")) == len({row["label"] for row in run.read(["label"]).to_pylist()})


def test_an_unfinished_run_says_so_and_a_finished_one_does_not(make_run: MakeRun, tmp_path: Path) -> None:
    run = make_run()
    assert "not finished" not in reported(tmp_path / "out", run)
    run.shard(1).unlink()
    words = Page(reported(tmp_path / "out", run)).text
    assert "This run is not finished: 1 of 3 batches are missing (8 of 24 images)" in words
    assert "Go on with: patchcleanser certify …" in words
    order = (
        "Images are done in the dataset's order, 3 of 3 classes so far: shares and intervals are those of the images"
    )
    assert order in words
    assert "treat the images as a random sample; those done so far are not one." in words
    assert re.search(r"^ *Unfinished \(16 of 24 images\): [\d.]+% of the images certified", words), (
        "the headline says it, too"
    )
    words = Page(reported(tmp_path / "out", run, make_run("done", masks=3), title="My title")).text
    assert "Unfinished (1 of 2 runs, 40 of 48 images): My title" in words


def test_every_image_is_listed_on_the_page_and_in_a_file(make_run: MakeRun, tmp_path: Path) -> None:
    run = make_run(skipped={3: "truncated"})
    data = json.loads(Page(reported(tmp_path / "out", run)).scripts[0])
    columns = {
        column["title"]: [column["texts"][cell] if "texts" in column else cell for cell in column["cells"]]
        for column in data["columns"]
    }
    rows = [row for row in run.read().to_pylist() if row["skipped"] is None]
    classes = ("cat", "dog", "frog")
    assert (
        columns["Image"] == [row["id"] for row in rows] == [line["image"] for line in table(tmp_path / "out", "images")]
    )
    assert columns["True label"] == [classes[row["label"]] for row in rows]
    assert columns["Answer"] == [classes[row["answer"]] for row in rows]
    assert columns["Certified"] == ["yes" if row["certified"] else "no" for row in rows]
    assert columns["Case"] == [{"agreed": "I", "disagreer": "II", "majority": "III"}[row["case"]] for row in rows]
    margins = [pytest.approx(row["margin"], abs=6e-4) if row["certified"] else None for row in rows]
    assert columns["Margin"] == margins


def test_a_page_lists_a_bounded_number_of_images(
    make_run: MakeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(contents, "MAX_ROWS", 10)
    page = Page(reported(tmp_path / "out", make_run()))
    assert all(len(column["cells"]) == 10 for column in json.loads(page.scripts[0])["columns"])
    assert "The page lists the first 10 of 24 images. All 24 rows are in tables/images.csv" in page.text
    assert len(table(tmp_path / "out", "images")) == 24


def test_a_run_without_rows_is_an_error_alone_and_left_out_beside_others(make_run: MakeRun, tmp_path: Path) -> None:
    empty, full = make_run("empty"), make_run("full")
    for batch in range(3):
        empty.shard(batch).unlink()
    with pytest.raises(RecordError, match="holds no rows yet; go on with: patchcleanser certify"):
        reported(tmp_path / "out", empty)
    assert "empty is left out:" in Page(reported(tmp_path / "out", empty, full)).text


def test_a_run_of_skipped_images_only_is_an_error_with_the_reason(make_run: MakeRun, tmp_path: Path) -> None:
    run = make_run(images=2, skipped={0: "truncated", 1: "truncated"}, pictures=False)
    with pytest.raises(RecordError, match=r"has an answer: all 2 were left out \(truncated\)"):
        reported(tmp_path / "out", run)


def test_skipped_images_are_counted_and_listed_with_their_reasons(make_run: MakeRun, tmp_path: Path) -> None:
    run = make_run(skipped={3: "cannot decode: truncated file"})
    words = Page(reported(tmp_path / "out", run)).text
    assert "1 image was left out" in words
    assert "image 3 cannot decode: truncated file" in words
    assert table(tmp_path / "out", "runs")[0]["images"] == "23"


def test_detection_never_stands_in_the_certified_column(make_run: MakeRun, tmp_path: Path) -> None:
    recovery, detection = make_run("recovery"), make_run("detection", detects=True)
    html = reported(tmp_path / "out", recovery, detection)
    (line,) = table(tmp_path / "out", "detection-runs")
    assert "certified" not in line
    assert int(line["detection_certified_count"]) == sum(
        row["detection_certified"] for row in detection.read(["detection_certified"]).to_pylist()
    )
    assert [row["defense"] for row in table(tmp_path / "out", "runs")] == ["double-masking"]
    assert "detection_certified" not in table(tmp_path / "out", "runs")[0]
    assert "a weaker guarantee" in Page(html).text


def test_a_page_of_detection_alone_never_says_that_an_answer_is_kept(make_run: MakeRun, tmp_path: Path) -> None:
    words = Page(reported(tmp_path / "out", make_run(detects=True))).text
    assert "certified for detection against any 2×2 px patch" in words
    assert "keeps its correct answer" not in words
    assert "can change the answer, wherever it is placed" not in words


NASTY = "<script>alert(1)</script>\"'&{{ 7*7 }}$x$"


def test_other_peoples_text_is_escaped_everywhere(make_run: MakeRun, tmp_path: Path) -> None:
    metadata = {
        "model": NASTY,
        "data": NASTY,
        "split": NASTY,
        "command": NASTY,
        "classes": [NASTY, f"<img src=x onerror={NASTY}>", "日本"],
        "versions": {NASTY: NASTY},
        "created": NASTY,
    }
    run = make_run(ids=lambda n: f"{n}{NASTY}", metadata=metadata, skipped={1: NASTY})
    html = reported(tmp_path / "out", run, title=NASTY)
    page = Page(html)
    assert {tag for tag, _ in page.tags}.isdisjoint({"img", "iframe", "object", "link"})
    assert [attributes for tag, attributes in page.tags if tag == "script"] == [{"type": "application/json"}, {}]
    data, script = page.scripts
    assert NASTY in json.loads(data)["columns"][1]["texts"]
    assert script == (Path(reports.__file__).parent / "page.js").read_text(encoding="utf-8"), "only our own script"
    assert not any(name.startswith("on") for _, attributes in page.tags for name in attributes)
    assert "&lt;script&gt;alert(1)" in html
    assert "{{ 7*7 }}" in page.text
    for drawn in (tmp_path / "out" / "figures").glob("*.svg"):
        assert "<script" not in drawn.read_text(encoding="utf-8")


def test_the_first_sentence_names_the_defense_its_masks_and_the_threat(make_run: MakeRun, tmp_path: Path) -> None:
    words = " ".join(Page(reported(tmp_path / "out", make_run("a"))).text.split())
    assert "defended by double-masking with 2×2 masks against a patch of" in words


def test_the_first_pictures_are_of_a_run_that_the_headline_is_about(make_run: MakeRun) -> None:
    runs = [(make_run("detects", detects=True), None), (make_run("recovers", masks=3, table=False), None)]
    pictured = contents.gather(runs).pictured
    assert pictured is not None
    assert pictured.result.run.folder.name == "recovers"


def test_what_only_the_package_has_is_explained(make_run: MakeRun, tmp_path: Path) -> None:
    facts = {"model": "zoo:tiny", "data": "sample"}
    runs = [make_run(f"{masks} masks", masks=masks, metadata=facts, table=False) for masks in (2, 3)]
    for some in (runs[:1], runs):
        words = Page(reported(tmp_path / "out", *some, derived=False)).text
        assert f"sample ({DATASETS['sample']})" in words
        assert "zoo:tiny (a small packaged classifier)" in words
        assert "A certified image keeps its correct answer whatever the patch shows" in words


def test_one_image_and_one_mask_are_singular(make_run: MakeRun, tmp_path: Path) -> None:
    words = Page(reported(tmp_path / "out", make_run(images=1, masks=1))).text
    assert "on 1 image of " in words
    assert "1 mask of 8×8 px" in words
    assert not re.search(r"(?<!×)\b1 (images|masks|classes|classifications|batches|runs)\b", words)


def test_the_page_loads_nothing_from_elsewhere(make_run: MakeRun, tmp_path: Path) -> None:
    html = reported(tmp_path / "out", make_run("a"), make_run("b", masks=3))
    for tag, attributes in Page(html).tags:
        for name in ("src", "href", "xlink:href", "data", "action", "poster", "srcset"):
            value = attributes.get(name)
            assert value is None or value.startswith(("#", "data:image/")), (tag, value)
    assert not re.search(r"@import|url\((?!#)", html)
    assert not re.search("https?:", re.sub(r"data:image/[^\"]*", "", html))
    assert "default-src 'none'" in html, "and the browser sees to it"


def test_the_page_is_built_for_readers(make_run: MakeRun, tmp_path: Path) -> None:
    html = reported(tmp_path / "out", make_run())
    tags = Page(html).tags
    assert [tag for tag, _ in tags].count("h1") == 1
    assert next(attributes for tag, attributes in tags if tag == "html") == {"lang": "en"}
    assert all(attributes.get("scope") for tag, attributes in tags if tag == "th")
    assert all(attributes.get("aria-label") for tag, attributes in tags if attributes.get("role") == "img")
    ids = [attributes["id"] for _, attributes in tags if "id" in attributes]
    assert len(ids) == len(set(ids))
    linked = {a["href"] for tag, a in tags if tag == "a" and "href" in a}
    assert linked <= {f"#{name}" for name in ids}
    for words in ("prefers-color-scheme: dark", "@media print", "max-width: 40rem"):
        assert words in html


def test_several_runs_make_one_report_with_lines_against_patch_and_masks(make_run: MakeRun, tmp_path: Path) -> None:
    runs = [
        make_run(f"p{side}m{masks}", threat=Threat.square(side), masks=masks, images=16, seed=side)
        for side in (1, 2)
        for masks in (2, 3)
    ]
    words = Page(reported(tmp_path / "out", *runs)).text
    assert [(row["patch"], row["masks"]) for row in table(tmp_path / "out", "runs")] == [
        ("1×1 px", "2×2"),
        ("1×1 px", "3×3"),
        ("2×2 px", "2×2"),
        ("2×2 px", "3×3"),
    ]
    assert "depending on the patch and the masks" in words
    assert words.count("Certified by patch size and number of masks") == 2  # in the contents, and as a heading
    figures = {path.name for path in (tmp_path / "out" / "figures").iterdir()}
    assert {"patch-size.svg", "mask-count.png", "accuracy.png", "weakness-p1m2.svg"} <= figures
    for run in runs:
        line = next(row for row in table(tmp_path / "out", f"classes-{run.folder.name}"))
        assert line["class"] in ("cat", "dog", "frog")


def test_runs_in_folders_of_one_name_keep_their_own_files(make_run: MakeRun, tmp_path: Path) -> None:
    first, second, third = make_run("a/x"), make_run("b/x", seed=1), make_run("c/x-2", seed=2)
    words = Page(reported(tmp_path / "out", first, second, third, pictures=False)).text
    assert {path.name for path in (tmp_path / "out" / "tables").glob("classes-*.csv")} == {
        "classes-x.csv",
        "classes-x-2.csv",
        "classes-x-2-2.csv",
    }
    assert "a/x" in words
    assert "b/x" in words


def test_images_of_different_sizes_are_reported_together(make_run: MakeRun, tmp_path: Path) -> None:
    run = make_run(sizes=((32, 32), (12, 20), (40, 16)), threat=Threat.share(0.02))
    words = Page(reported(tmp_path / "out", run)).text
    assert "Images of 3 sizes are laid over each other" in words
    assert len(table(tmp_path / "out", "smaller-patches")) > 1


@pytest.mark.parametrize("threat", [Threat.square(1, count=2), Threat.any_rectangle(4), Threat.square(2, grid="input")])
def test_every_kind_of_threat_can_be_reported(make_run: MakeRun, tmp_path: Path, threat: Threat) -> None:
    words = Page(reported(tmp_path / "out", make_run(threat=threat, images=8))).text
    assert "Where images are weak" in words


def test_a_run_without_tables_or_circumstances_is_reported(make_run: MakeRun, tmp_path: Path) -> None:
    run = make_run(table=False, metadata={}, pictures=False)
    words = Page(reported(tmp_path / "out", run)).text
    assert "This run did not store its two-mask tables" in words
    assert "classifier cccccccccc" in words
    assert "class 0" in words


def test_tables_come_in_three_and_figures_in_two_formats(make_run: MakeRun, tmp_path: Path) -> None:
    reported(tmp_path / "out", make_run())
    for folder, endings in (("tables", {".csv", ".md", ".tex"}), ("figures", {".svg", ".png"})):
        files: dict[str, set[str]] = {}
        for path in (tmp_path / "out" / folder).iterdir():
            files.setdefault(path.stem, set()).add(path.suffix)
        assert files.pop("images", {".csv"}) == {".csv"}  # too long to be read
        assert files
        assert all(suffixes == endings for suffixes in files.values())


def test_equal_results_are_one_number_and_only_what_matters_is_named(make_run: MakeRun, tmp_path: Path) -> None:
    def headline(*runs: Run) -> str:
        return Page(reported(tmp_path / "out", *runs, derived=False, pictures=False)).text.partition(" · ")[0].strip()

    first, same = make_run("first"), make_run("same", metadata={"model": "zoo:other", "data": "cifar10"})
    more = make_run("more", masks=3, seed=3)
    assert re.fullmatch(
        r"[\d.]+% of the images certified against any 2×2 px patch, in both runs", headline(first, same)
    )
    assert re.fullmatch(
        r"[\d.]+% to [\d.]+% of the images certified against any 2×2 px patch, depending on the masks",
        headline(first, more),
    )
    # Two runs that differ in the model and in the masks do not tell which of them it was.
    assert headline(same, more).endswith("in 2 runs")


def test_the_title_and_the_text_agree_on_the_number_of_runs(make_run: MakeRun, tmp_path: Path) -> None:
    runs = [make_run(name, seed=n) for n, name in enumerate("abc")]
    detection = [make_run("detects", detects=True), make_run("detects too", detects=True, masks=3)]
    words = Page(reported(tmp_path / "out", *runs, *detection, derived=False)).text
    assert "certified against any 2×2 px patch, in 3 runs (2 more only detect)" in words
    assert "5 runs (2 detection-only)" in words
    assert "Accuracy of 3 runs" in words


def test_long_names_of_runs_stay_whole_in_the_figure(make_run: MakeRun, tmp_path: Path) -> None:
    models = (f"timm:{'a_very_' * 5}long_name.{end}" for end in ("first", "second"))
    runs = [
        make_run(f"{n}-{masks}", masks=masks, metadata={"model": name})
        for n, name in enumerate(models)
        for masks in (2, 3)
    ]
    reported(tmp_path / "out", *runs, derived=False)
    drawn = (tmp_path / "out" / "figures" / "accuracy.svg").read_text(encoding="utf-8")
    assert all(words in drawn for words in ("long_name.first", "long_name.second", "2×2 masks", "3×3 masks"))
    assert {row["run"] for row in table(tmp_path / "out", "runs")} == {run.folder.name for run in runs}


def test_paths_on_the_page_keep_their_last_name_only(make_run: MakeRun, tmp_path: Path) -> None:
    metadata = {"data": "folder:/home/me/photos", "split": None, "command": "certify --data folder:/home/me/photos"}
    html = reported(tmp_path / "out", make_run(metadata=metadata, skipped={1: "cannot decode /home/me/photos/1.png"}))
    assert "/home/me" not in html
    unfinished = make_run("unfinished", metadata=metadata)
    unfinished.shard(1).unlink()
    assert "/home/me" not in reported(tmp_path / "out", unfinished)
    assert "cannot decode 1.png" in html
    assert "images of folder:photos," in Page(html).text
    assert "(None)" not in html


def test_the_classifications_of_each_run_are_counted_in_the_same_way(make_run: MakeRun, tmp_path: Path) -> None:
    runs = [make_run(f"{masks} masks", masks=masks, table=False) for masks in (2, 3)]
    reported(tmp_path / "out", *runs, make_run("detects", detects=True, masks=2), derived=False)
    assert [row["most"] for row in table(tmp_path / "out", "cost")] == [
        "11: 4 masks, 6 pairs, 1 unmasked",
        "46: 9 masks, 36 pairs, 1 unmasked",
        "5: 4 masks, 1 unmasked",
    ]


def test_a_short_run_has_no_seconds_per_image_and_the_page_says_why(make_run: MakeRun, tmp_path: Path) -> None:
    runs = [make_run(f"{images} images", images=images, masks=images // 12, table=False) for images in (24, 48)]
    words = Page(reported(tmp_path / "out", *runs, derived=False, pictures=False)).text
    costs = table(tmp_path / "out", "cost")
    assert [(row["seconds"], float(row["total"])) for row in costs] == [("", 6), ("0.25", 12)]
    assert "Seconds per image are not shown of runs under 10 seconds" in words
    words = Page(reported(tmp_path / "out", runs[1], derived=False, pictures=False)).text
    assert "not shown of runs" not in words


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({}, "3 rows computed again, 1 certified image attacked, none fooled, no contradiction"),
        (
            {"contradictions": [{"patches": []}]},
            "3 rows computed again, 1 certified image attacked, 1 fooled, 1 contradiction",
        ),
        ({"digest": "another"}, "is of other rows; run it again"),
    ],
)
def test_the_page_says_what_an_audit_found(
    make_run: MakeRun, tmp_path: Path, change: dict[str, object], words: str
) -> None:
    run = make_run(table=False)
    before = Page(reported(tmp_path / "out", run, derived=False, pictures=False)).text
    assert f"patchcleanser audit {os.path.relpath(run.folder)}" in before
    audit = {**dict.fromkeys(SIGNED, 0), "key": run.key, "digest": run.digest, "contradictions": []}
    audit |= {"derived": [0, 1, 2], "attacked": [0]} | change
    (run.folder / "audit").mkdir()
    (run.folder / AUDIT).write_text(json.dumps({**audit, "signature": sign(audit)}), encoding="utf-8")
    after = Page(reported(tmp_path / "out", run, derived=False, pictures=False)).text
    assert words in after
    assert words not in before
    assert ("patchcleanser audit" in after) == ("other rows" in words)
    assert ("trust no number of this run" in after) == ("1 contradiction" in words)
    assert (f"Audited : {words}." in after.split("zoo:tiny")[0]) == ("no contradiction" in words)
    assert ("An audit does not show that other rows are right" in after) == ("other rows" not in words)


def test_smaller_patches_that_change_nothing_are_a_sentence(make_run: MakeRun, tmp_path: Path) -> None:
    run = make_run(threat=Threat.square(3))
    derived = derive(run)
    assert derived is not None
    same = replace(derived, smaller=[(side, Proportion(3, 4)) for side in (1, 2, 3)])
    html = unlinked(write_report([(run, same)], tmp_path / "out").read_text(encoding="utf-8"))
    assert "75.0% of the images are row-certified at every side from 1 to 3 px" in html
    assert not (tmp_path / "out" / "figures" / "smaller-patches.svg").exists()


def test_the_map_keeps_its_colours_on_a_dark_page(make_run: MakeRun) -> None:
    run = make_run(images=60)
    result = read_result(run, derive(run))
    assert result is not None
    drawing = run_figures(result, "")["weakness"]
    assert {rgb2hex(SHADES(value)) for value in np.linspace(0, 1, 256)}.isdisjoint(ROLES)
    (scale,) = drawing.figure.axes[0].child_axes
    assert scale.get_ylim()[0] == 0
    assert "Light is strong" in drawing.caption


def test_sections_of_a_single_run_go_from_the_proof_to_its_weak_places_and_end_with_what_next(
    make_run: MakeRun, tmp_path: Path
) -> None:
    html = reported(tmp_path / "out", make_run(metadata={"model": "zoo:tiny", "data": "cifar10"}))
    sections = re.findall(r'<section id="([a-z]+)">', html)
    assert sections == ["promise", "weak", "images", "classes", "cost", "provenance", "next", "words"]


def test_published_numbers_beyond_five_rows_are_folded(make_run: MakeRun, tmp_path: Path) -> None:
    html = reported(tmp_path / "out", make_run(threat=Threat.square(5), sizes=((32, 32),)), derived=False)
    shown, folded = html.split('id="published"')[1].split("</section>")[0].split("<details>")
    rows = len(table(tmp_path / "out", "published"))
    assert (shown.count("<tr class"), folded.count("<tr class")) == (5, rows - 5)
    assert f"{rows - 5} more rows" in folded


def test_words_are_linked_where_they_first_occur_and_explained_at_the_end(make_run: MakeRun, tmp_path: Path) -> None:
    html = reported(tmp_path / "out", make_run())
    for word in ("double-masking", "challenger-masking", "minority-reports", "classification"):
        assert html.count(f'href="#word-{word}"') == html.count(f'<dt id="word-{word}">') == 1
    assert "word-auto-pgd" not in html
    assert "disagreer" not in html.lower()
    assert not re.search(r"\bJob\b", Page(html).text)


def test_other_peoples_text_cannot_open_a_link() -> None:
    content = Markup('<p title="classification">a &lt;a href="x"&gt; classification <code>run digest</code></p>')
    assert linked(content) == str(content).replace(
        " classification <", ' <a href="#word-classification">classification</a> <'
    )


def test_what_must_stay_the_same_is_what_the_soundness_page_lists(make_run: MakeRun, tmp_path: Path) -> None:
    root = Path(__file__).parent.parent.parent
    soundness = (root / "docs" / "internals" / "soundness.md").read_text(encoding="utf-8")
    (listed,) = re.findall(r"when certifying and predicting: ([^.]*)\.", soundness)
    names = [re.sub(r"s\b", "", " ".join(name.split())).strip("`") for name in listed.split(",")]
    assert len(names) == 7
    words = Page(reported(tmp_path / "out", make_run(), derived=False)).text
    readme = " ".join((root / "README.md").read_text(encoding="utf-8").split())
    for text in (words.split("another setting")[1], readme.split("set up otherwise")[1]):
        singular = re.sub(r"s\b", "", text)
        assert [name for name in names if name not in singular] == []


def test_a_table_of_images_shortens_ids_and_orders_what_it_filters_by(make_run: MakeRun, tmp_path: Path) -> None:
    run = make_run(ids=lambda n: f"sample.parquet:{n}:test/{n:05}.png", table=False)
    data = json.loads(Page(reported(tmp_path / "out", run)).scripts[0])
    columns = {column["title"]: column for column in data["columns"]}
    assert data["names"][3] == "test/00003.png"
    assert columns["Image"]["cells"][3] == "sample.parquet:3:test/00003.png"
    assert columns["Certified"]["texts"] == ["yes", "no"]
    assert columns["Case"]["texts"] == sorted(columns["Case"]["texts"])
    assert columns["True label"]["choose"]
    same = make_run("same", ids=lambda n: f"{n}.parquet:{n}:same.png", table=False)
    assert json.loads(Page(reported(tmp_path / "out", same)).scripts[0])["names"] is None


def test_a_single_run_is_named_by_what_it_is(make_run: MakeRun, tmp_path: Path) -> None:
    reported(tmp_path / "out", make_run("a"))
    assert table(tmp_path / "out", "cost")[0]["run"] == "double-masking, 2×2 masks"
    assert table(tmp_path / "out", "runs")[0]["run"] == "double-masking, 2×2 masks"


def test_reports_never_need_torch() -> None:
    code = "import patchcleanser.reports, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_page_promises_no_proof_where_labels_were_fast(make_run: MakeRun, tmp_path: Path) -> None:
    exact = make_run()
    fast = changed(exact, lambda row: row.update(unconfirmed=3 * row["row_certified"]), precision="fast")
    for run, proved in ((exact, True), (fast, False)):
        page = unlinked(write_report([(run, None)], tmp_path / "report").read_text(encoding="utf-8"))
        assert ("That is proved, not only tested." in page) == proved
        assert ("certificates are statistical, not proofs" in page.partition("<h2>What is proved")[0]) != proved
        assert ("a certificate that rests on such labels is statistical" in page) != proved
