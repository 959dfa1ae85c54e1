"""Every claim of the leaderboard follows from what it names, and a changed one fails."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from patchcleanser import CallableClassifier
from patchcleanser.core.geometry import Window
from patchcleanser.core.threats import Threat
from patchcleanser.data import ArrayDataset
from patchcleanser.defenses import DEFENSES
from patchcleanser.errors import RecordError
from patchcleanser.evaluation import Job, evaluate
from patchcleanser.records.derive import verdicts
from patchcleanser.records.run import Run
from patchcleanser.reports.claims import OURS, DefenseClaim
from patchcleanser.reports.leaderboard import CLAIMS, PAGE, check, generated, main
from patchcleanser.reports.leaderboard_page import page
from patchcleanser.reports.rederive import claim_of, numbers_of, problems_of

MakeRun = Callable[..., Run]
ROOT = Path(__file__).parents[2]
PAPER = {"method": "A", "promise": "recovery", "data": "cifar10", "patch": "5", "certified": 50.0, "measured_by": "B"}
PAPER |= {"paper": "Title", "authors": "B et al., Venue 2026"}


@pytest.fixture
def repository(make_run: MakeRun, tmp_path: Path) -> DefenseClaim:
    """A claim of a run in `tmp_path`, which is a repository of nothing else."""
    run = make_run("rows", images=16, sizes=((32, 32),), threat=Threat.square(5), table=True)
    claim = claim_of(run, method="Ours", data="cifar10", measured_by="us")
    claim = replace(claim, run="rows")
    claim.write(tmp_path / CLAIMS / "ours.json")
    return claim


def reported(**facts: Any) -> DefenseClaim:
    return DefenseClaim.from_dict({**PAPER, **facts})


def test_every_claim_of_the_repository_follows_from_its_rows_and_the_page_is_up_to_date() -> None:
    claims, problems = check(ROOT)
    assert problems == []
    assert {claim.standing for claim in claims} == {"re-derived", "measured", "reported"}
    for path, text in generated(claims).items():
        assert (ROOT / path).read_text(encoding="utf-8") == text, f"{path}: run make leaderboard"


def test_every_run_of_the_repository_has_a_claim() -> None:
    claims, _ = check(ROOT)
    runs = {path.parent.relative_to(ROOT).as_posix() for path in ROOT.glob("results/reproduce/rows/*/manifest.json")}
    assert {claim.run for claim in claims if claim.run} >= runs


@pytest.mark.parametrize(
    ("name", "change"),
    [
        *((name, lambda value: round(value - 0.01, 2)) for name in ("certified", "undefended", "classifications")),
        *((name, lambda value: value + 1) for name in ("images", "at", "count")),
        ("clean", lambda value: round(value + 0.01, 2)),
        ("grid", lambda _: "input"),
        ("masks", lambda _: "9x9"),
        ("labels", lambda _: "fast"),
        ("promise", lambda _: "detection"),
        ("defense", lambda _: "ds"),
        ("data", lambda _: "imagenet"),
        ("attack", lambda _: "adaptive, 1000 steps"),
        ("run_key", lambda value: value[::-1]),
        ("run_digest", lambda value: value[::-1]),
    ],
)
def test_one_changed_value_of_a_claim_fails(
    repository: DefenseClaim, tmp_path: Path, name: str, change: Callable[[Any], Any]
) -> None:
    assert list(problems_of(repository, tmp_path)) == []
    changed = replace(repository, **{name: change(getattr(repository, name))})
    (problem,) = problems_of(changed, tmp_path)
    assert problem.startswith(f"{name} is ") or name == "defense"


def test_another_patch_of_a_claim_fails(repository: DefenseClaim, tmp_path: Path) -> None:
    problems = problems_of(replace(repository, patch="6x6", side=6), tmp_path)
    assert [problem.partition(",")[0] for problem in problems] == ["patch is 6x6", "side is 6"]


def test_one_changed_row_fails(repository: DefenseClaim, tmp_path: Path) -> None:
    run = Run.open(tmp_path / "rows")
    rows = run.read_batch(0).to_pylist()
    rows[0]["seconds"] += 1
    run.write(0, rows)
    assert any(problem.startswith("run_digest is") for problem in problems_of(repository, tmp_path))


def test_rows_that_are_not_there_fail(repository: DefenseClaim, tmp_path: Path) -> None:
    shutil.rmtree(tmp_path / "rows")
    (problem,) = problems_of(repository, tmp_path)
    assert "no run in" in problem


def test_a_claim_cannot_name_files_outside_of_the_repository(repository: DefenseClaim, tmp_path: Path) -> None:
    for claim in (replace(repository, run="../rows"), reported(table="../secret.json#", paper=None)):
        (problem,) = problems_of(claim, tmp_path / "leaderboard")
        assert "outside of" in problem


def test_numbers_of_a_table_are_compared_with_its_entry(tmp_path: Path) -> None:
    entry = {"images": 200, "clean": 80.5, "certified": 50.25, "patch": "5x5", "ms": 3.125, "classifications": 33.0}
    entry |= {"data": "cifar10", "grid": "source", "at": 32, "defense": "cbn", "options": {"scale": 0.15}}
    origin = {"versions": {"hardware": "H"}}
    (tmp_path / "t.json").write_text(json.dumps([{}, {**entry, **origin}]), encoding="utf-8")
    facts = {"images": 200, "clean": 80.5, "certified": 50.25, "patch": "5x5", "milliseconds": 3.12, "hardware": "H"}
    facts |= {"grid": "source", "side": 5, "at": 32, "defense": "cbn", "options": "scale=0.15"}
    claim = reported(table="t.json#/1", classifications=33.0, **facts)
    assert list(problems_of(claim, tmp_path)) == []
    assert claim.standing == "measured"
    changes: dict[str, Any] = {"certified": 50.26, "clean": 81, "images": 201, "milliseconds": 4.0, "data": "svhn"}
    changes |= {"grid": "input", "masks": "6x6", "at": 33, "count": 2, "labels": "fast", "attack": "adaptive"}
    changes |= {"defense": "ds", "options": "scale=0.2"}
    for name, value in changes.items():
        (problem,) = problems_of(replace(claim, **{name: value}), tmp_path)
        assert problem.startswith(f"{name} is ")
    (problem,) = problems_of(replace(claim, patch="6x6", side=6), tmp_path)
    assert problem.startswith("patch is 6x6, but t.json#/1 has 5x5")
    (problem,) = problems_of(replace(claim, table="t.json#/7"), tmp_path)
    assert "names no entry" in problem
    (problem,) = problems_of(replace(claim, undefended=99.0), tmp_path)
    assert problem.startswith("undefended is 99.0, but t.json#/1 has None")
    (problem,) = problems_of(replace(claim, table="t.json#/0"), tmp_path)
    assert "cannot be read: KeyError" in problem


def test_an_attack_is_compared_with_its_record(tmp_path: Path) -> None:
    record: dict[str, Any] = {"certified_images_attacked": 40, "certified_images_fooled": 0}
    record |= {"attack": "apgd", "iterations": 9, "locations": 2, "patch": "5x5", "data": "cifar10"}
    (tmp_path / "t.json").write_text(json.dumps(record), encoding="utf-8")
    facts = {"patch": "5x5", "attack": "Auto-PGD, 9 steps, 2 places", "attacked": 40, "fooled": 0}
    claim = reported(attack_table="t.json#", **facts)
    assert list(problems_of(claim, tmp_path)) == []
    changes: dict[str, Any] = {"attacked": 41, "fooled": 1, "attack": "Auto-PGD, 10 steps, 2 places", "patch": "6x6"}
    for name, value in {**changes, "data": "svhn"}.items():
        (problem,) = problems_of(replace(claim, **{name: value}), tmp_path)
        assert problem.startswith(f"{name} is ")


def test_detection_follows_from_the_rows_of_recovery(make_run: MakeRun) -> None:
    run = make_run(images=16, sizes=((32, 32),), threat=Threat.square(5), table=True)
    numbers = numbers_of(run, "minority-reports", "threshold=0.9")
    assert (numbers["promise"], numbers["options"]) == ("detection", "threshold=0.9")
    assert numbers["certified"] <= numbers["clean"]
    assert numbers["classifications"] is None
    with pytest.raises(RecordError, match="bagcert does not follow from the rows"):
        numbers_of(run, "bagcert")


@pytest.mark.parametrize(
    ("defense", "options", "message"),
    [
        ("challenger-masking", "seed=3", "challenger-masking with seed=3 does not follow"),
        ("challenger-masking", "coarse=2", "challenger-masking with coarse=2 does not follow"),
        ("challenger-masking", "as good as it gets", "does not follow"),
        ("one-pass", None, "one-pass does not follow"),
        ("minority-reports", "0.5", "from 0 to 1, got 0.5"),
        ("minority-reports", "threshold=nan", "from 0 to 1, got threshold=nan"),
        ("minority-reports", "threshold=-1", "from 0 to 1, got threshold=-1"),
        ("minority-reports", "seed=3", "from 0 to 1, got seed=3"),
    ],
)
def test_options_that_the_rows_do_not_decide_are_refused(
    repository: DefenseClaim, tmp_path: Path, defense: str, options: str | None, message: str
) -> None:
    promise = "detection" if defense == "minority-reports" else "recovery"
    claim = replace(repository, defense=defense, options=options, promise=promise)
    (problem,) = problems_of(claim, tmp_path)
    assert message in problem


@pytest.fixture(scope="module")
def coarse_rows(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Double-masking after a coarse round, by a classifier whose labels change under many masks."""
    weights = torch.randn(5, 3 * 12 * 12, generator=torch.Generator().manual_seed(1))
    shaky = CallableClassifier(lambda x: x.flatten(1) @ weights.T, array="torch", fingerprint="shaky")
    pixels = np.random.default_rng(0).integers(0, 256, (8, 12, 12, 3), dtype=np.uint8)
    labels = shaky.logits(torch.from_numpy(pixels).permute(0, 3, 1, 2).float() / 255).argmax(1).numpy()
    data = ArrayDataset("noise", pixels, labels.astype(np.int64), [str(k) for k in range(5)])
    job = Job(shaky, data, "3", masks=4, table=True, options={"coarse": 2})
    return evaluate(job, tmp_path_factory.mktemp("rows"))


def test_challenger_masking_follows_with_the_coarse_round_of_the_rows_only(coarse_rows: Run) -> None:
    numbers = numbers_of(coarse_rows, "challenger-masking", "coarse=2")
    clean, _ = verdicts(coarse_rows, "challenger-masking", coarse=True)
    assert (numbers["clean"], numbers["options"]) == (round(clean.percent, 2), "coarse=2")
    with pytest.raises(RecordError, match="does not follow"):
        numbers_of(coarse_rows, "challenger-masking")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"threat": Threat.square(5, region=Window(0, 0, 16, 16))}, "patches anywhere"),
        ({"skipped": {3: "broken file"}}, "counts every image"),
    ],
    ids=["region", "skipped"],
)
def test_runs_that_leave_out_places_or_images_make_no_claim(
    make_run: MakeRun, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(RecordError, match=message):
        numbers_of(make_run(images=8, sizes=((32, 32),), **{"threat": Threat.square(5), **settings}))


def test_a_coarse_round_has_a_theorem_of_its_own() -> None:
    plain, coarse = (reported(defense="double-masking", options=options) for options in (None, "coarse=3"))
    assert (plain.theorem, coarse.theorem) == (
        "a_certified_image_keeps_its_label",
        "a_coarse_certified_image_keeps_its_label",
    )


def test_attacks_and_unfinished_runs_make_no_claim(make_run: MakeRun, make_attack: MakeRun) -> None:
    with pytest.raises(RecordError, match=r"about a run of certify; .* is an attack"):
        numbers_of(make_attack("attacked"))
    run = make_run()
    run.shard(0).unlink()
    with pytest.raises(RecordError, match="1 batch short of its end: finish it"):
        numbers_of(run)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"certifed": 1.0}, "no field 'certifed'; did you mean certified?"),
        ({"certified": "50"}, 'certified is a number, got "50"'),
        ({"certified": True}, "certified is a number, got true"),
        ({"images": 1.5}, "images is a whole number or null, got 1.5"),
        ({"certified": 101}, "certified is a percentage from 0 to 100, got 101"),
        ({"clean": 40.0}, "certified is at most clean"),
        ({"grid": "pixels"}, "grid is source or input, got pixels"),
        ({"promise": "hope"}, "promise is recovery or detection, got hope"),
        ({"patch": "five"}, "cannot read patch 'five'"),
        ({"defense": "dubble-masking"}, "did you mean double-masking"),
        ({"paper": None}, "names its run, table or paper"),
        ({"run": "rows"}, "run needs run_key and run_digest"),
        ({"run": "rows", "run_key": "a", "run_digest": "b", "table": "t.json#"}, "got both"),
        ({"run_key": "a"}, "are hashes of a run, got no run"),
        ({"milliseconds": 3.0}, "milliseconds need their hardware"),
        ({"side": 5}, "side and at go together, got 5 and None"),
        ({"side": 6, "at": 32}, "side is 6, but 5 of 32x32 px is 5x5"),
        ({"patch": "2%", "side": 35, "at": 224}, "side is 35, but 2% of 224x224 px is 32x32"),
        ({"code": "javascript:alert(1)"}, "code is an address, https://…, got javascript"),
        ({"attacked": 3}, "attacked and fooled need their record"),
        ({"attack": "adaptive", "attacked": 0, "fooled": 0}, "attacked and fooled need their record"),
        ({"rederived": 0}, "rederived needs its record"),
        ({"audit_key": "a", "rederived": 50, "attacked": 50, "fooled": 0}, "names the audit of a run, got no run"),
    ],
)
def test_errors_of_the_schema_name_the_field_the_value_and_the_limit(change: dict[str, Any], message: str) -> None:
    with pytest.raises(RecordError, match=re.escape(message)):
        reported(**change)


def test_a_missing_field_and_a_file_that_is_no_json_are_named(tmp_path: Path) -> None:
    with pytest.raises(RecordError, match="the field 'method' is missing"):
        DefenseClaim.from_dict({name: value for name, value in PAPER.items() if name != "method"})
    path = tmp_path / "broken.json"
    path.write_text("{", encoding="utf-8")
    with pytest.raises(RecordError, match=re.escape("broken.json is no readable JSON")):
        DefenseClaim.read(path)


def test_the_command_names_every_problem_and_writes_nothing(
    repository: DefenseClaim, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["--check"]) == 1
    assert f"{PAGE} is out of date; run: make leaderboard" in capsys.readouterr().err
    assert main([]) == 0
    assert main(["--check"]) == 0
    replace(repository, clean=100.0, certified=99.0).write(CLAIMS / "ours.json")
    (CLAIMS / "other.json").write_text("[]", encoding="utf-8")
    before = PAGE.read_text(encoding="utf-8")
    capsys.readouterr()
    assert main([]) == 1
    errors = capsys.readouterr().err
    assert "leaderboard/claims/ours.json: certified is 99.0, but its rows give" in errors
    assert "leaderboard/claims/other.json: a claim is a JSON object, got list" in errors
    assert PAGE.read_text(encoding="utf-8") == before


def test_the_order_of_claims_does_not_change_the_page() -> None:
    claims, _ = check(ROOT)
    assert page(claims) == page(claims[::-1])


def test_grids_and_promises_never_share_a_table() -> None:
    claims = [
        reported(method=f"{promise}-{grid}", promise=promise, grid=grid)
        for promise in ("recovery", "detection")
        for grid in ("source", "input", None)
    ]
    tables = re.findall(r'data-grid="([^"]+)" markdown>\n(.*?)</div>', page(claims), flags=re.DOTALL)
    assert [grid for grid, _ in tables] == ["source", "input", "not stated"] * 2
    for claim in claims:
        assert sum(f"| {claim.method} |" in text for _, text in tables) == 1
    assert (
        page(claims).index("## Recovery") < page(claims).index("## Detection") < page(claims).index("detection-source")
    )


def test_the_page_says_who_measured_and_where_code_and_attack_are(repository: DefenseClaim) -> None:
    attacked: dict[str, Any] = {"attack": "adaptive", "attacked": 1, "fooled": 0, "attack_table": "t.json#"}
    ours, theirs = replace(repository, measured_by=OURS), replace(repository, measured_by="A. Author", **attacked)
    text = page([ours, theirs, reported(code="https://example.org/x"), reported(patch="6")])
    assert text.count("; by ") == text.count("; by A. Author |") == 1
    assert text.count("| Coq: *a certified image keeps its label* | adaptive: 1 image, 0 certified ones fooled |") == 1
    assert "- B et al., Venue 2026: Title. [Code](https://example.org/x).\n" in text


def test_no_number_in_a_figure_covers_a_point_or_another_number() -> None:
    figures = re.findall(r"<svg.*?</svg>", (ROOT / PAGE).read_text(encoding="utf-8"))
    assert len(figures) > 3
    for svg in figures:
        marks = [(float(x), float(y)) for x, y in re.findall(r'<circle cx="([\d.]+)" cy="([\d.]+)"', svg)]
        texts = re.findall(r'<text x="([\d.]+)" y="([\d.]+)"[^>]*>', svg[svg.rindex("<circle") :])  # they come last
        numbers = [(float(x), float(y) - 4) for x, y in texts]  # y is the baseline
        assert numbers
        for at, (x, y) in enumerate(numbers):
            assert all(abs(x - mark[0]) >= 9 or abs(y - mark[1]) >= 10 for mark in marks)
            assert all(abs(x - other[0]) >= 8 or abs(y - other[1]) >= 10 for other in numbers[:at])


def test_text_of_a_claim_cannot_break_the_page() -> None:
    hostile = "<script>alert(1)</script>|x"
    costs = [reported(method=hostile, milliseconds=2.0**n, hardware=hostile, note=hostile) for n in range(5)]
    text = page(costs)
    assert "<figure>" in text
    assert re.search(r"(?<!\\)<script", text) is None


def test_the_readme_lists_every_field_and_the_template_fits_the_schema() -> None:
    text = (ROOT / "leaderboard" / "README.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`(\w+)`", "".join(re.findall(r"^\|(.*?)\|", text, flags=re.MULTILINE))))
    assert {field.name for field in fields(DefenseClaim)} <= named
    assert DefenseClaim.read(ROOT / "leaderboard" / "template.json").standing == "reported"


def test_the_theorem_of_each_defense_stands_in_the_proofs() -> None:
    proofs = "".join(path.read_text(encoding="utf-8") for path in ROOT.glob("proofs/*.v"))
    theorems = [entry.theorem for entry in DEFENSES.values() if entry.theorem]
    assert len(theorems) == 10
    assert all(f"Theorem {name} " in proofs for name in theorems)
