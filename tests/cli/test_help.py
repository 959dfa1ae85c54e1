"""How options are shown and typed: groups, short forms, habits, completion, nearest names, examples."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import typer

from patchcleanser import Job, Threat, load_classifier, load_dataset
from patchcleanser.attacks import AttackSettings
from patchcleanser.classifiers.trained import zoo_folders
from patchcleanser.cli.app import COMMANDS, app
from patchcleanser.cli.help import CHOICES, EXAMPLES, GROUPS, SHORT, zoo_models
from patchcleanser.cli.options import CommonOptions
from patchcleanser.data import chosen
from patchcleanser.errors import InputError, PatchCleanserError
from patchcleanser.evaluation.class_names import match_labels

from .conftest import Command

SAMPLE, TINY = load_dataset("sample"), load_classifier("zoo:tiny", device="cpu")
ROOT: Any = typer.main.get_command(app)


def parsed(*words: str) -> dict[str, Any]:
    """The options of a call that is not carried out."""
    context = ROOT.commands[words[0]].make_context(words[0], list(words[1:]), parent=ROOT.make_context("p", ["masks"]))
    return dict(context.params)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_option_is_in_a_group_but_those_of_all_commands(command: str) -> None:
    options = [option for option in ROOT.commands[command].params if option.param_type_name == "option"]
    groups = {option.name: option.rich_help_panel for option in options}
    assert {name for name, group in groups.items() if group is None} == set(vars(CommonOptions()))
    assert set(groups.values()) - {None} <= set(GROUPS)


@pytest.mark.parametrize("command", COMMANDS)
def test_the_examples_in_help_are_calls_that_parse(command: str) -> None:
    assert len(EXAMPLES[command]) == 2
    for example in EXAMPLES[command]:
        words = shlex.split(example)
        assert words[0] == command
        assert parsed(*words)


def test_short_forms_and_habits_mean_the_same_as_long_ones() -> None:
    typed = ["--model", "a", "--data", "b", "--patch", "3", "--out", "c", "--limit", "4", "--batch", "5", "--quiet"]
    short = [f"-{SHORT[word[2:]]}" if word.startswith("--") else word for word in typed]
    assert parsed("certify", *short) == parsed("certify", *typed)
    habits = ["--threat", "3", "--output", "c", "--batch-size", "5", "--num-workers", "2"]
    assert parsed("certify", *habits) == parsed("certify", "-p", "3", "-o", "c", "-b", "5", "-w", "2")
    assert parsed("certify", "--batch_size", "5") == parsed("certify", "-b", "5")


def test_habits_are_not_in_help(run: Command) -> None:
    text = run("certify", "-h").out
    assert "--batch" in text
    assert "--batch-size" not in text
    assert "Threat" in text


def test_train_takes_epochs_as_an_option(run: Command) -> None:
    done = run("train", "-m", "net:tiny", "-o", "out", "--epochs", "0", "-d", "sample")
    assert done.code == 2
    assert "epochs" in done.err


def test_train_takes_the_batch_as_harden_does_and_as_it_is_called_elsewhere(run: Command) -> None:
    for spelling in ("--batch", "--batch-size"):
        done = run("train", "-m", "net:tiny", "-o", "out", spelling, "0", "-d", "sample")
        assert done.code == 2
        assert "batch are at least 1" in done.err


def test_an_option_that_a_command_does_not_have_is_named_as_it_was_typed(run: Command) -> None:
    for typed in ("--num-workers", "--batch-size"):
        assert f"No such option: {typed}" in run("masks", typed, "3").err
    assert "No such option: --workers" in run("masks", "--workers", "3").err


@pytest.mark.parametrize(
    ("words", "near"),
    [
        (["certfy"], "certify"),
        (["certify", "--modle", "zoo:tiny"], "--model"),
        (["certify", "--unreadable", "skp"], "skip"),
        (["attack", "--attack", "apg"], "apgd"),
        (["attack", "--loss", "margn"], "margin"),
    ],
)
def test_a_wrong_name_gets_the_nearest_right_one(words: list[str], near: str, run: Command) -> None:
    done = run(*words)
    assert done.code == 2
    assert re.search(rf"(did you mean|Did you mean|Possible options:)\W+{near}", done.err)


ACCEPTS: dict[str, Callable[[Any], object]] = {
    "confirm": lambda choice: Job(TINY, SAMPLE, Threat.square(5), confirm=choice).built,
    "grid": lambda choice: Threat.square(5, grid=choice),
    "labels": lambda choice: match_labels(SAMPLE, TINY, choice),
    "loss": lambda choice: AttackSettings(loss=choice),
    "places": lambda choice: AttackSettings(places=choice),
    "precision": lambda choice: Job(TINY, SAMPLE, Threat.square(5), precision=choice).built,
    "subset": lambda choice: chosen(SAMPLE, 2, subset=choice),
}


@pytest.mark.parametrize("name", ACCEPTS)
def test_the_package_accepts_every_choice_and_no_other(name: str) -> None:
    for choice in CHOICES[name]:
        assert ACCEPTS[name](choice) is not None
    with pytest.raises(InputError):
        ACCEPTS[name]("another")


def completed(*words: str, tail: str) -> str:
    line = " ".join(["patchcleanser", *words, tail])
    environment = {"_PATCHCLEANSER_COMPLETE": "complete_zsh", "_TYPER_COMPLETE_ARGS": line}
    script = (
        "import sys\nfrom patchcleanser.cli.app import app\n"
        "try:\n    app(prog_name='patchcleanser')\nfinally:\n    assert 'torch' not in sys.modules\n"
    )
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, **environment})
    assert "AssertionError" not in done.stderr, done.stderr
    return done.stdout


def test_values_are_completed_without_torch() -> None:
    assert "minority-reports" in completed("certify", "--defense", tail="min")
    assert "zoo:tiny" in completed("certify", "-m", tail="zoo").replace("\\", "")
    assert "cifar100" in completed("certify", "--data", tail="cif")
    assert "adaptive" in completed("attack", "--attack", tail="ad")


def test_the_zoo_that_is_completed_is_the_zoo_that_loads() -> None:
    assert zoo_models() == sorted(zoo_folders())


def test_traceback_shows_where_an_error_came_from(run: Command) -> None:
    assert run("certify", "--precision", "fst").err.count("\n") == 1
    with pytest.raises(PatchCleanserError):
        run("certify", "--precision", "fst", "--traceback")
