"""The leaderboard in a real browser: its tables are filtered and sorted, and can be read without a script."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from markdown import markdown

from patchcleanser.reports.claims import DefenseClaim
from patchcleanser.reports.leaderboard_page import page

pytestmark = pytest.mark.slow

DOCS = Path(__file__).parents[2] / "docs" / "results"
FEW = 10
"""Rows of a table before its button is pressed."""
CLAIMS = [
    DefenseClaim(
        method=f"method {n:02}",
        promise="recovery",
        data="cifar10" if n % 2 else "imagenet",
        patch="2%",
        certified=float(n),
        measured_by="A",
        paper="B",
        authors="C",
        grid=grid,
        images=1000 - n if n % 5 else None,
    )
    for grid in ("source", "input")
    for n in range(60)
]


@pytest.fixture
def site(tmp_path: Path) -> Path:
    body = markdown(page(CLAIMS), extensions=["tables", "md_in_html", "meta"])
    css, script = (DOCS.joinpath(f"leaderboard.{kind}").read_text(encoding="utf-8") for kind in ("css", "js"))
    path = tmp_path / "page.html"
    html = f"<!doctype html><meta charset=utf-8><style>{css}</style><body>{body}<script>{script}</script>"
    path.write_text(html, encoding="utf-8")
    return path


@pytest.fixture
def opened(browser: Any, site: Path) -> Callable[..., Any]:
    def opening(**options: Any) -> Any:
        tab = browser.new_context(**options).new_page()
        tab.goto(site.as_uri())
        return tab

    return opening


def methods(tab: Any, grid: str) -> list[str]:
    rows = tab.locator(f'[data-grid="{grid}"] tbody tr:not([hidden]) td:first-child')
    return [text[-2:] for text in rows.all_text_contents()]


def test_filters_keep_the_rows_that_fit_in_every_table(opened: Callable[..., Any]) -> None:
    tab = opened()
    assert len(methods(tab, "source")) == len(methods(tab, "input")) == FEW
    tab.get_by_label("Data").select_option("cifar10")
    assert tab.locator(".claim-filters output").text_content() == "60 of 120 claims"
    assert {int(name) % 2 for name in methods(tab, "input")} == {1}
    tab.get_by_label("Grid").select_option("source")
    assert methods(tab, "input") == []
    assert tab.locator('[data-grid="input"]').is_hidden()
    tab.get_by_role("button", name="all 30 claims").click()
    assert len(methods(tab, "source")) == 30


def test_a_header_sorts_all_rows_and_unknown_numbers_come_last(opened: Callable[..., Any]) -> None:
    tab = opened()
    head = tab.locator('[data-grid="source"] th', has_text="Images")
    head.get_by_role("button").click()
    assert methods(tab, "source")[:4] == ["01", "02", "03", "04"]
    assert head.get_attribute("aria-sort") == "descending"
    head.get_by_role("button").click()
    assert methods(tab, "source")[:4] == ["59", "58", "57", "56"]
    tab.get_by_role("button", name="all 60 claims").first.click()
    assert {int(name) % 5 for name in methods(tab, "source")[-12:]} == {0}


def test_a_phone_sorts_as_well(opened: Callable[..., Any]) -> None:
    tab = opened(viewport={"width": 390, "height": 800})
    tab.locator('[data-grid="input"] th', has_text="Method").get_by_role("button").click()
    assert methods(tab, "input")[:2] == ["59", "58"]


def test_without_a_script_every_row_is_there(opened: Callable[..., Any]) -> None:
    tab = opened(java_script_enabled=False)
    assert len(methods(tab, "source")) == len(methods(tab, "input")) == 60
    assert tab.locator(".claim-filters").is_hidden()
