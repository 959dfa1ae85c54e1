"""A bar where someone looks, lines where they are wanted, and else nothing."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from patchcleanser import DoubleMasking, Job, evaluate, load_classifier, load_dataset
from patchcleanser.classifiers import CallableClassifier
from patchcleanser.data import chosen
from patchcleanser.defenses import DEFENSES
from patchcleanser.progress import progress_bar

SAMPLE = chosen(load_dataset("sample"), 4)
IMAGES = [SAMPLE.image(n) for n in range(4)]
LABELS = [0, 1, 0, 1]
MODEL = CallableClassifier(lambda x: x.mean((2, 3))[:, :2], array="torch", fingerprint="two colours")


def printed(progress: bool | None, *, terminal: bool, width: int = 80) -> str:
    console = Console(file=io.StringIO(), force_terminal=terminal, width=width, legacy_windows=False)
    with progress_bar("certify", progress, total=8, done=2, console=console) as show:
        show(5, 8, "certified 40.0%")
        show(8, 8, "certified 50.0%")
    return console.file.getvalue()  # type: ignore[attr-defined, no-any-return]


@pytest.mark.parametrize("width", [80, 60])
def test_a_terminal_gets_a_bar_that_fits(width: int) -> None:
    text = printed(None, terminal=True, width=width)
    for words in ("certify", "━", "8/8", "certified 50.0%", "in 0:00"):
        assert words in text


def test_an_estimate_that_has_passed_gives_way_to_the_time_so_far() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=80, legacy_windows=False)
    with progress_bar("certify", total=8, seconds=1e-9, console=console):
        pass
    assert "0:00 so far" in console.file.getvalue()  # type: ignore[attr-defined]


def test_without_a_terminal_lines_must_be_wanted() -> None:
    assert printed(None, terminal=False) == ""
    assert printed(True, terminal=False) == "certify 8/8  certified 50.0%\n"


def test_false_shows_nothing_anywhere() -> None:
    assert printed(False, terminal=True) == printed(False, terminal=False) == ""


def test_nothing_is_shown_by_default_where_standard_error_is_no_terminal(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    defense = DoubleMasking(MODEL, "2", masks=2)
    defense.certify(IMAGES, LABELS)
    defense.predict(IMAGES)
    evaluate(Job(MODEL, list(zip(IMAGES, LABELS, strict=True)), "2", masks=2), tmp_path)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("name", ["double-masking", "ds", "ibp"])
def test_defenses_count_the_images_they_have_done(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    model: Any = load_classifier("net:interval", device="cpu") if name == "ibp" else MODEL
    defense = DEFENSES[name].load()(model, "2")
    defense.certify(IMAGES, LABELS, progress=True)
    assert "certify 4/4" in capsys.readouterr().err
    defense.predict(IMAGES, progress=True)
    assert "predict 4/4" in capsys.readouterr().err


def test_a_run_shows_what_is_certified_so_far(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    job = Job(MODEL, list(zip(IMAGES, LABELS, strict=True)), "2", masks=2)
    evaluate(job, tmp_path, progress=True)
    assert "2x2 patch, 2×2 masks, double-masking 4/4  certified " in capsys.readouterr().err
