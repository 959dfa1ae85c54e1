"""Options in dataclasses: declared once, expanded for each command, and true to the registries."""

from __future__ import annotations

from dataclasses import dataclass
from inspect import signature
from typing import Annotated

import pytest
import typer
from typer.testing import CliRunner

from patchcleanser.attacks import ATTACKS
from patchcleanser.cli.app import COMMANDS, CONTINUED, StoppedError, app, as_command
from patchcleanser.cli.options import DefenseOptions, RunnerOptions, RunOptions
from patchcleanser.defenses import DEFENSES
from patchcleanser.defenses.mask_defense import MaskDefense
from patchcleanser.errors import InputError


@dataclass(frozen=True)
class Size:
    """Two options, one of them required."""

    width: Annotated[int, typer.Option(help="Pixels across.")]
    tall: Annotated[bool, typer.Option("--tall", help="Twice as high.")] = False


def draw(name: Annotated[str, typer.Argument()], size: Size, colour: str = "red") -> None:
    """Draw something."""
    if colour == "none":
        raise KeyboardInterrupt
    print(name, size, colour)


def typed(*words: str) -> tuple[int, str]:
    program = typer.Typer(pretty_exceptions_enable=False)
    program.command()(as_command(draw))
    done = CliRunner().invoke(program, words)
    return done.exit_code, done.output


def test_fields_of_a_dataclass_become_options_and_come_back_as_the_dataclass() -> None:
    parameters = ["context", "name", "width", "tall", "colour", "config", "quiet", "traceback"]
    assert list(signature(as_command(draw)).parameters) == parameters
    assert typed("box", "--width", "3", "--tall") == (0, f"box {Size(3, True)} red\n")
    assert typed("box", "--width", "3", "--colour", "blue") == (0, f"box {Size(3, False)} blue\n")


def test_help_describes_expanded_options_and_a_required_one_is_required() -> None:
    code, text = typed("--help")
    assert code == 0
    for words in ("Draw something.", "--width", "Pixels across.", "--tall", "Twice as high.", "--colour"):
        assert words in text
    code, text = typed("box")
    assert code == 2
    assert "Missing option '--width'" in text


def test_ctrl_c_leaves_a_command_as_an_error_that_typer_does_not_swallow() -> None:
    program = typer.Typer(pretty_exceptions_enable=False)
    program.command()(as_command(draw))
    done = CliRunner().invoke(program, ["box", "--width", "3", "--colour", "none"])
    assert isinstance(done.exception, StoppedError)
    assert str(done.exception) == "draw"


def test_commands_that_go_on_after_a_stop_are_commands() -> None:
    assert set(COMMANDS) > CONTINUED


@pytest.mark.parametrize("command", ["certify", "attack"])
def test_commands_that_share_options_have_all_of_them_with_the_same_defaults(command: str) -> None:
    parameters = signature(as_command(COMMANDS[command])).parameters
    for group in (RunOptions(), RunnerOptions()):
        assert {name: parameters[name].default for name in vars(group)} == vars(group)


def test_help_names_every_defense_and_attack() -> None:
    wide = {"COLUMNS": "400", "TERM": "dumb", "NO_COLOR": "1"}
    text = CliRunner().invoke(app, ["attack", "--help"], env=wide).output
    assert ", ".join(DEFENSES) in text
    assert ", ".join(ATTACKS) in text


def test_the_first_four_defenses_are_those_with_masks_as_help_says() -> None:
    with_masks = [name for name, entry in DEFENSES.items() if issubclass(entry.load(), MaskDefense)]
    assert with_masks == list(DEFENSES)[:4]
    assert DefenseOptions().defense in with_masks


def test_options_of_a_cluster_are_refused_without_one() -> None:
    with pytest.raises(InputError, match="--workers belongs to --on ray"):
        RunnerOptions(workers=2)
    with pytest.raises(InputError, match="--gpus-per-worker belongs to --on ray"):
        RunnerOptions(gpus=0.5)
    assert RunnerOptions(on="ray", workers=2, gpus=1).device("auto") == "cpu"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--option", "precision=fast"], "--option takes name=value of the defense's own options (coarse), got"),
        (["--option", "confirm=all"], "--option takes name=value of the defense's own options (coarse), got"),
        (["--defense", "ds", "--option", "kep=4"], "(ablation, keep, threshold), got 'kep=4'; did you mean keep?"),
        (["--confirm", "all"], "--confirm belongs to --precision fast"),
        (["--masks", "3x"], "--masks takes a whole number, or one for each axis as 6x4, got '3x'"),
    ],
)
def test_an_option_that_would_be_ignored_or_guessed_is_refused(words: list[str], message: str) -> None:
    done = CliRunner().invoke(app, ["certify", "--limit", "2", "--device", "cpu", *words])
    assert isinstance(done.exception, InputError)
    assert message in str(done.exception)
