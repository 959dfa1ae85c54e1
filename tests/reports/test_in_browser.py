"""The report in a real browser, from the disk."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from patchcleanser.records.derive import derive
from patchcleanser.records.run import Row, Run
from patchcleanser.reports import write_report

from .test_comparison import changed

MakeRun = Callable[..., Run]
pytestmark = pytest.mark.slow

SCREENS = {"desktop": {"width": 1280, "height": 800}, "phone": {"width": 390, "height": 844}}
HOSTILE = "</script><script>document.title = 'hacked'</script><img src=x onerror=\"document.title='hacked'\">"


def other_name_and_proof(row: Row) -> None:
    """A long id; only every fourth image certified as well as row-certified, so that each has a column."""
    row |= {"id": f"sample.parquet:{row['index']}:test/{row['index']:05}.png"}
    row |= {"certified": row["certified"] and row["index"] % 4 == 0}


@pytest.fixture
def opened(browser: Any) -> Iterator[Callable[..., Any]]:
    complaints: list[str] = []
    contexts: list[Any] = []

    def opening(path: Path, **options: Any) -> Any:
        contexts.append(browser.new_context(**options))
        page = contexts[-1].new_page()
        page.on("console", lambda message: complaints.append(message.text))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.goto(path.as_uri())
        return page

    yield opening
    for context in contexts:
        context.close()
    assert complaints == []


CUT = "regions => regions.filter(r => r.scrollWidth > r.clientWidth).map(r => r.ariaLabel)"
"""The names of the tables of which something is cut off."""


def fits(page: Any, selector: str) -> bool:
    """Whether nothing in this region is cut off on the right."""
    return bool(page.locator(selector).evaluate("region => region.scrollWidth <= region.clientWidth"))


def column(page: Any, number: int) -> list[str]:
    return list(page.locator(f".image-list tbody tr > :nth-child({number})").all_inner_texts())


@pytest.mark.parametrize("screen", SCREENS)
def test_a_picture_is_on_the_first_screen_and_nothing_sticks_out(
    make_run: MakeRun, make_attack: MakeRun, tmp_path: Path, opened: Callable[..., Any], screen: str
) -> None:
    runs = [make_run(), make_run("more", masks=3, seed=1), make_attack()]
    for number, some in enumerate((runs[:1], runs[:2], runs[2:])):
        page = opened(write_report([(r, None) for r in some], tmp_path / f"{number}"), viewport=SCREENS[screen])
        box = page.locator("figure svg").first.bounding_box()
        assert box["y"] + box["height"] < SCREENS[screen]["height"]
        assert page.evaluate("document.documentElement.scrollWidth") == SCREENS[screen]["width"]


def test_no_column_of_the_images_is_cut_off_on_a_desktop(
    make_run: MakeRun, make_attack: MakeRun, tmp_path: Path, opened: Callable[..., Any]
) -> None:
    facts = {"classes": ["automobile"] * 3}
    runs = [make_run(metadata=facts, table=False), make_attack(metadata=facts)]
    for number, run in enumerate(changed(run, other_name_and_proof) for run in runs):
        page = opened(write_report([(run, None)], tmp_path / f"{number}"), viewport=SCREENS["desktop"])
        assert "Row-certified" in page.inner_text(".image-list thead")
        assert ("Margin" in page.inner_text(".image-list thead")) == (run.kind == "certify")
        assert fits(page, ".image-list .scroll")


def test_the_classes_of_a_detection_fit_on_a_desktop(
    make_run: MakeRun, tmp_path: Path, opened: Callable[..., Any]
) -> None:
    run = make_run(metadata={"classes": ["automobile", "bird", "cat"]}, detects=True)
    page = opened(write_report([(run, None)], tmp_path / "out"), viewport=SCREENS["desktop"])
    assert page.locator(".scroll").evaluate_all(CUT) == []


def test_no_table_is_cut_off_on_a_phone_and_its_images_can_be_sorted(
    make_run: MakeRun, make_attack: MakeRun, tmp_path: Path, opened: Callable[..., Any]
) -> None:
    facts = {"classes": ["automobile", "Entlebucher Sennenhund", "truck"]}
    detects = make_run("detects", metadata=facts, detects=True)
    others = [make_run(metadata=facts, table=False), make_attack(metadata=facts)]
    for number, run in enumerate([detects, *(changed(run, other_name_and_proof) for run in others)]):
        page = opened(write_report([(run, None)], tmp_path / f"{number}"), viewport=SCREENS["phone"])
        assert page.locator(".scroll").evaluate_all(CUT) == []
        page.click(".image-list th button:text-is('True label')")
        assert (labels := column(page, 2)) == sorted(labels, key=str.lower)


def test_rows_without_a_picture_leave_its_place_free_and_the_page_says_why(
    make_run: MakeRun, tmp_path: Path, opened: Callable[..., Any]
) -> None:
    run = make_run(images=120, table=False)
    for path in (run.folder / "gallery").iterdir():
        if int(path.stem) % 2:
            path.unlink()
    page = opened(write_report([(run, None)], tmp_path / "out"))
    starts = page.locator(".image-list .pictured").evaluate_all(
        """cells => cells.map(cell => {
            const text = document.createRange();
            text.selectNode(cell.lastChild);
            return text.getBoundingClientRect().left;
        })"""
    )
    assert 0 < page.locator(".image-list .thumbnail").count() < len(starts) == 50
    assert len(set(starts)) == 1
    assert "Rows of the images whose pictures were saved have a thumbnail" in page.inner_text("#images")


def test_on_a_phone_no_name_breaks_and_no_number_stands_alone(
    make_run: MakeRun, tmp_path: Path, opened: Callable[..., Any]
) -> None:
    run = make_run(metadata={"classes": ["automobile", "cat", "truck"]})
    page = opened(write_report([(run, derive(run))], tmp_path / "out"), viewport=SCREENS["phone"])
    heights = page.locator("#classes tbody th").evaluate_all("cells => cells.map(cell => cell.offsetHeight)")
    assert len(set(heights)) == 1
    lines = page.locator(".image-list tbody tr, #cost tbody tr").evaluate_all(
        """rows => rows.map(row => {
            const cells = [...row.querySelectorAll("td")].filter(cell => cell.offsetHeight);
            const tops = cells.map(cell => cell.offsetTop);
            return tops.filter(top => top === Math.max(...tops)).length;
        })"""
    )
    assert min(lines) > 1
    assert page.locator(".scroll").evaluate_all(CUT) == []


def test_a_saved_picture_that_no_group_shows_opens_large(
    make_run: MakeRun, tmp_path: Path, opened: Callable[..., Any]
) -> None:
    run = make_run(images=120, table=False, ids=lambda n: f"sample.parquet:{n}:test/{n}.png")
    page = opened(write_report([(run, None)], tmp_path / "out"))
    shown = page.locator(".gallery figure").evaluate_all("all => all.map(one => one.dataset.image)")
    other = next(n for n in range(50) if f"sample.parquet:{n}:test/{n}.png" not in shown)
    label = page.locator("label:has-text('True label') select")
    assert label.locator("option").all_inner_texts() == ["all", "cat", "dog", "frog"]
    page.click(f".image-list [aria-label='Enlarge sample.parquet:{other}:test/{other}.png']")
    assert page.inner_text("dialog figcaption") == f"test/{other}.png"
    assert page.locator("dialog svg").bounding_box()["height"] > 300


def test_images_are_sorted_and_filtered_by_keyboard(
    make_run: MakeRun, tmp_path: Path, opened: Callable[..., Any]
) -> None:
    run = make_run(images=120, table=False)
    rows = run.read().to_pylist()
    margins = [row["margin"] for row in rows if row["certified"]]
    page = opened(write_report([(run, None)], tmp_path / "out"))
    assert len(column(page, 1)) == 50
    page.focus("text=More →")
    page.keyboard.press("Enter")
    assert page.inner_text(".image-list output") == "51 to 100 of 120"
    page.focus(".image-list th button:text-is('Margin')")
    page.keyboard.press("Enter")
    assert column(page, 8)[0] == f"{min(margins):.3f}"
    page.keyboard.press("Enter")
    assert column(page, 8)[0] == f"{max(margins):.3f}"
    assert page.get_attribute(".image-list th:nth-child(8)", "aria-sort") == "descending"
    page.focus(".image-list input")
    page.keyboard.type("image 11")
    assert {*column(page, 1)} == {"image 11", *(f"image {n}" for n in range(110, 120))}
    page.fill(".image-list input", "")
    page.select_option("label:text-is('Case') select, label:has-text('Case') select", label="III")
    assert {*column(page, 6)} == {"III"}
    assert page.inner_text(".image-list output").endswith(f"of {sum(row['case'] == 'majority' for row in rows)}")


def test_a_thumbnail_opens_large_and_the_keyboard_goes_on_and_back(
    make_run: MakeRun, tmp_path: Path, opened: Callable[..., Any]
) -> None:
    page = opened(write_report([(make_run(), None)], tmp_path / "out"))
    page.focus(".image-list .thumbnail")
    page.keyboard.press("Enter")
    first = page.inner_text("dialog figcaption")
    assert page.locator("dialog svg").bounding_box()["height"] > 300
    page.keyboard.press("ArrowRight")
    assert page.inner_text("dialog figcaption") != first
    page.keyboard.press("ArrowLeft")
    assert page.inner_text("dialog figcaption") == first
    page.keyboard.press("Escape")
    assert not page.locator("dialog").is_visible()


def test_names_from_elsewhere_run_nothing(make_run: MakeRun, tmp_path: Path, opened: Callable[..., Any]) -> None:
    facts = dict.fromkeys(("model", "data", "split", "command", "created"), HOSTILE)
    facts |= {"classes": [HOSTILE, "dog", "frog"], "versions": {HOSTILE: HOSTILE}}
    folder = HOSTILE.replace("/", "")
    runs = [
        make_run(f"{n}{folder}", ids=lambda i: f"{i}{HOSTILE}", metadata=facts, masks=n, table=False) for n in (2, 3)
    ]
    page = opened(write_report([(run, None) for run in runs], tmp_path / "out"))
    page.click("details.run .image-list .thumbnail")
    assert "hacked" not in page.title()
    assert page.locator("img").count() == 0
    assert HOSTILE in page.inner_text(".image-list tbody tr:first-child")


def test_without_script_the_page_says_where_the_images_are(
    make_run: MakeRun, tmp_path: Path, opened: Callable[..., Any]
) -> None:
    page = opened(write_report([(make_run(), None)], tmp_path / "out"), java_script_enabled=False)
    assert page.locator(".gallery svg").first.is_visible()
    assert not page.locator(".image-list").is_visible()
    assert "All 24 rows are in tables/images.csv" in page.inner_text("#images")
