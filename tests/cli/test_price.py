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


def test_wrong_settings_are_refused(run: Command) -> None:
    assert "--masks is a comma list of masks per axis, as 3,4,5,6; got '3x4'" in run("price", "--masks", "3x4").err
    assert run("price", "--masks", "4", "--coarse", "1", "--limit", "1").code == 2
