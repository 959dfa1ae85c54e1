"""price: what settings cost and give, on the same images."""

from __future__ import annotations

import json

from .conftest import Command


def test_each_setting_is_priced_and_certifies_as_certify_does(run: Command) -> None:
    images = ("--model", "zoo:tiny", "--patch", "5", "--limit", "8", "--device", "cpu")
    rows = json.loads(run("price", *images, "--masks", "3,4", "--coarse", "2", "--json").out)
    settings = [(row["defense"], row["masks"], row["coarse"]) for row in rows]
    defenses = ("double-masking", "challenger-masking")
    assert settings == [(name, masks, coarse) for masks in (3, 4) for coarse in (0, 2) for name in defenses]
    for row in rows:
        assert row["prediction_ms"] > 0 < row["certificate_ms"]
        assert row["prediction_labels"] >= (row["coarse"] or row["masks"]) ** 2
        assert row["certificate_labels"] > row["masks"] ** 2
    by_setting = dict(zip(settings, rows, strict=True))
    plain, after_coarse = (by_setting["double-masking", 4, coarse] for coarse in (0, 2))
    assert after_coarse["prediction_labels"] < plain["prediction_labels"]
    for row, coarse in ((plain, "0"), (after_coarse, "2")):
        run_result = json.loads(run("certify", *images, "--masks", "4", "--coarse", coarse, "--json").out)
        assert row["certified"]["count"] == run_result["certified"]["count"]
        assert row["clean"]["count"] == run_result["clean"]["count"]


def test_a_network_for_one_pass_is_priced_in_one_pass_as_well(run: Command) -> None:
    for model, labels in (("net:bagnet?width=16&depth=3", (1, 1)), ("net:split?width=12&depth=2&head=2", (9, 45))):
        options = ("--model", f"visible:{model}", "--patch", "5", "--limit", "3", "--device", "cpu")
        rows = json.loads(run("price", *options, "--masks", "3", "--coarse", "2", "--json").out)
        names = ["double-masking", "challenger-masking", "double-masking", "challenger-masking", "one-pass"]
        assert sorted(row["defense"] for row in rows) == sorted(names)
        (one_pass,) = (row for row in rows if row["defense"] == "one-pass")
        assert (one_pass["masks"], one_pass["coarse"], one_pass["precision"]) == (3, 0, "exact")
        assert labels[0] <= one_pass["prediction_labels"] <= labels[1]
        assert labels[0] <= one_pass["certificate_labels"] <= labels[1]
        certify = json.loads(run("certify", *options, "--defense", "one-pass", "--masks", "3", "--json").out)
        assert one_pass["clean"]["count"] == certify["clean"]["count"]


def test_fast_labels_are_priced_beside_exact_ones(run: Command) -> None:
    options = (
        "--model",
        "zoo:tiny",
        "--patch",
        "5",
        "--limit",
        "2",
        "--device",
        "cpu",
        "--masks",
        "3",
        "--coarse",
        "0",
    )
    rows = json.loads(run("price", *options, "--precision", "fast", "--json").out)
    assert [row["precision"] for row in rows] == ["exact", "exact", "fast", "fast"]
    assert "precision" in run("price", *options).out


def test_wrong_settings_are_refused(run: Command) -> None:
    assert "--masks is a comma list of masks per axis, as 3,4,5,6; got '3x4'" in run("price", "--masks", "3x4").err
    assert run("price", "--masks", "4", "--coarse", "1", "--limit", "1").code == 2
