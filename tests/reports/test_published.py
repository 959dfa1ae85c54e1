"""PublishedRow numbers stand beside runs of the same data and patch, and beside no others."""

from __future__ import annotations

import csv
from collections.abc import Callable
from pathlib import Path

import pytest

from patchcleanser.core.threats import Threat
from patchcleanser.records.derive import derive
from patchcleanser.records.run import Run
from patchcleanser.reports import write_report
from patchcleanser.reports.published import comparable, published
from patchcleanser.reports.run_results import RunResult, read_result

MakeRun = Callable[..., Run]


def studied(make_run: MakeRun, size: int, threat: Threat, data: str, **settings: object) -> RunResult:
    run = make_run(images=2, batch=2, sizes=((size, size),), threat=threat, metadata={"data": data}, **settings)
    result = read_result(run, None)
    assert result is not None
    return result


@pytest.mark.parametrize(
    ("size", "patch", "data", "certified"),
    [
        (32, "5", "cifar10", 89.1),
        (32, "2.4%", "cifar10", 89.1),
        (32, "5", "sample", 89.1),
        (32, "2", "cifar10", 94.3),
        (224, "35", "cifar10", 89.1),
        (224, "2%", "imagenet", 64.9),
        (224, "32", "imagenet", 64.9),
        (224, "23", "imagenette", 97.5),
        (32, "5", "svhn", 71.7),
        (32, "4", "cifar10", None),
        (32, "0.4%", "cifar10", None),  # 3×3 px, where the paper's is 2×2
        (32, "5", "folder:photos", None),
    ],
)
def test_only_the_same_data_and_patch_compare(
    make_run: MakeRun, size: int, patch: str, data: str, certified: float | None
) -> None:
    rows = comparable(studied(make_run, size, Threat.parse(patch), data, pictures=False))
    best = max((row.certified for row in rows if row.promise == "recovery"), default=None)
    assert best == certified


def test_two_patches_compare_with_two_patches_only(make_run: MakeRun) -> None:
    result = studied(make_run, 224, Threat.share(0.01, count=2), "imagenet", pictures=False, masks=2)
    assert {(row.count, row.certified) for row in comparable(result)} == {(2, 45.8)}


def test_rows_are_facts_with_a_source() -> None:
    rows = published()
    assert len(rows) > 100
    assert all(0 <= row.certified <= 100 and row.citation and row.paper for row in rows)
    (main,) = (
        row
        for row in rows
        if (row.method, row.data, row.patch, row.masks) == ("PatchCleanser, ViT-B/16", "imagenet", "2%", "6x6")
    )
    assert (main.undefended, main.clean, main.certified, main.grid) == (84.8, 83.9, 62.1, "input")
    assert {row.method for row in rows if row.promise == "detection"} >= {"PatchCensor", "ViP"}


def test_the_page_says_that_the_paper_means_the_enlarged_input(make_run: MakeRun, tmp_path: Path) -> None:
    run = make_run(images=4, sizes=((32, 32),), threat=Threat.square(5))
    html = write_report([(run, derive(run))], tmp_path / "out").read_text(encoding="utf-8")
    assert "enlarges 32×32 images to 224×224" in html
    assert "stronger statement" in html
    assert "BagCert" in html


def test_printed_numbers_reach_every_format(make_run: MakeRun, tmp_path: Path) -> None:
    run = make_run(images=4, sizes=((32, 32),), threat=Threat.square(5))
    write_report([(run, None)], tmp_path / "out")
    with (tmp_path / "out" / "tables" / "published.csv").open(encoding="utf-8", newline="") as file:
        ours, *theirs = csv.DictReader(file)
    assert ours["certified_total"] == "4"
    wanted = [(row.method, row.certified, row.clean, row.undefended) for row in comparable(_read(run))]
    assert [
        (r["method"], float(r["certified"]), _number(r["clean"]), _number(r["undefended"])) for r in theirs
    ] == wanted
    text = (tmp_path / "out" / "tables" / "published.md").read_text(encoding="utf-8")
    assert all(f"| {certified} |" in text for _, certified, _, _ in wanted)


def test_runs_of_one_model_are_told_apart(make_run: MakeRun, tmp_path: Path) -> None:
    runs = [
        make_run(name, images=4, sizes=((32, 32),), threat=Threat.parse(patch), masks=masks, seed=masks)
        for name, patch, masks in (("a", "5", 2), ("b", "5", 3), ("c", "2.4%", 3), ("d", "5", 3))
    ]
    html = write_report([(run, None) for run in runs], tmp_path / "out", pictures=False).read_text(encoding="utf-8")
    for name in ("2×2 masks, 5×5 px patch", "3×3 masks, 2.4% patch", "3×3 masks, 5×5 px patch, b"):
        assert f"zoo:tiny, double-masking, {name}<" in html


def _read(run: Run) -> RunResult:
    result = read_result(run, None)
    assert result is not None
    return result


def _number(text: str) -> float | None:
    return float(text) if text else None
