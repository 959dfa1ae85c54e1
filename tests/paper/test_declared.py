"""What the experiments declare: known models and images, the paper's own numbers, commands that exist."""

from __future__ import annotations

import shlex

import pytest
import typer

from patchcleanser.cli.app import app
from patchcleanser.paper import EXPERIMENTS
from patchcleanser.paper.models import (
    PAPER_DATASETS,
    PAPER_MODELS,
    PRINTED,
    USUAL,
    scale,
    square_patch,
    training_commands,
    usual_patch,
)
from patchcleanser.reports.published import published
from patchcleanser.training.recipes import RECIPES

COMMANDS = typer.main.get_command(app).commands  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_rows_name_known_models_and_images_and_no_row_stands_twice(name: str) -> None:
    experiment = EXPERIMENTS[name]
    assert experiment.name == name
    assert experiment.rows or experiment.pictures
    assert len({row.key for row in experiment.rows}) == len(experiment.rows)
    measures = {measure.key for measure in experiment.measures}
    for row in experiment.rows:
        assert row.spec.model in PAPER_MODELS
        assert row.spec.data in PAPER_DATASETS
        assert set(row.printed) <= measures
        assert bool(row.variant) == bool(experiment.variant)
        assert row.spec.threat.grid == row.spec.grid


@pytest.mark.parametrize("wanted", range(2, 9))
def test_every_table_of_the_evaluation_is_declared(wanted: int) -> None:
    assert f"Table {wanted}" in {experiment.paper for experiment in EXPERIMENTS.values()}


FAMILIES = {"resnet": "ResNetV2-50", "vit": "ViT-B/16", "mlp": "ResMLP-24"}


def test_the_authors_rows_carry_the_numbers_that_the_reports_print_for_them() -> None:
    published_rows = {
        (p.method, p.data, p.side): {"clean": p.clean, "certified": p.certified}
        for p in published()
        if p.method.startswith("PatchCleanser") and p.count == 1 and p.side and p.masks == "6x6"
    }
    compared = 0
    for name in ("table2", "table5", "table6"):
        for row in EXPERIMENTS[name].rows:
            who, _, rest = row.spec.model.partition("-")
            if who != "authors" or row.spec.grid == "source":
                continue
            family, _, more = rest.partition("-")
            method = f"PatchCleanser, {FAMILIES[family]}" + (", no cutout training" if more.endswith("vanilla") else "")
            low = row.spec.data in ("cifar10", "cifar100", "svhn")
            side = int(row.spec.patch) // (7 if low else 1)
            want = published_rows[method, row.spec.data, side]
            assert {key: row.printed[key] for key in want} == want
            compared += 1
    assert compared == 24 + 18 + 18


def test_the_paper_s_patch_lies_on_the_enlarged_input_and_ours_on_the_pixels_as_they_came() -> None:
    theirs, sound = square_patch("authors-vit-cifar10", 5), square_patch("authors-vit-cifar10", 5, grid="source")
    assert (theirs.patch, theirs.grid) == ("35", "input")
    assert (sound.patch, sound.grid) == ("5", "source")
    assert square_patch("tiny", 5) == square_patch("tiny", 5, grid="source")  # nothing is enlarged there
    tuned, smaller = square_patch("cifar10-resnet50", 5), square_patch("cifar10-resnet50-128", 5)
    assert (tuned.patch, tuned.grid) == ("35", "input")
    assert (smaller.patch, smaller.grid) == ("20", "input")  # enlarged four times, not seven
    assert theirs in EXPERIMENTS["table2"].specs
    assert sound in EXPERIMENTS["table2"].specs
    assert (usual_patch("imagenet-resnet50").patch, usual_patch("imagenet-resnet50").grid) == ("32", "input")


@pytest.mark.parametrize(
    ("model", "times"),
    [("tiny", 1), ("svhn-vit", 1), ("ablated", 1), ("cifar10-resnet50-128", 4), ("authors-mlp-svhn", 7), (PRINTED, 1)],
)
def test_a_small_image_is_enlarged_to_the_side_of_the_model_s_input(model: str, times: int) -> None:
    assert scale(model) == times
    assert usual_patch(model).patch == str(USUAL[PAPER_MODELS[model].data] * times)


def test_experiments_share_the_runs_they_have_in_common() -> None:
    shared = [name for name, experiment in EXPERIMENTS.items() if usual_patch("tiny") in experiment.specs]
    assert {"table2", "table3", "figure4", "figure6", "figure8", "figure9", "figure10", "figure22"} <= set(shared)


@pytest.mark.parametrize("command", training_commands(), ids=lambda text: text.rsplit("/", 1)[1])
def test_the_commands_that_make_our_models_are_ones_this_version_takes(command: str) -> None:
    program, name, *words = shlex.split(command)
    assert program == "patchcleanser"
    with COMMANDS[name].make_context(name, words) as context:
        assert str(context.params["out"]).startswith("runs/models/")
        if name == "train":
            changes = [change.split("=") for change in context.params["change"] or ()]
            assert RECIPES[context.params["recipe"]].changed(dict(changes))


def test_every_model_either_comes_with_us_or_says_how_to_have_it() -> None:
    for model in PAPER_MODELS.values():
        assert model.spec.startswith("zoo:") or model.training or model.download
        assert "{" not in model.fill(model.spec)
        assert "{" not in model.advice
    assert sum(model.training is not None for model in PAPER_MODELS.values()) == len(training_commands())
