"""The `patchcleanser` command and how it ends: an answer, a clear error, or a clean stop."""

from __future__ import annotations

import functools
import shlex
import sys
from collections.abc import Callable
from typing import Annotated, Any

import typer
from rich.console import Console

import patchcleanser
from patchcleanser.cli import (
    attack,
    audit,
    certify,
    data,
    demo,
    harden,
    masks,
    models,
    predict,
    report,
    reproduce,
    serve,
    train,
)
from patchcleanser.errors import PatchCleanserError

app = typer.Typer(
    name="patchcleanser",
    help="Certified defense of any image classifier against adversarial patches.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)


class StoppedError(Exception):
    """Ctrl-C; the command-line library would swallow it without a word."""


def _stoppable(command: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(command)
    def run(*args: Any, **options: Any) -> None:
        try:
            command(*args, **options)
        except KeyboardInterrupt:
            raise StoppedError from None

    return run


COMMANDS: dict[str, Callable[..., None]] = {
    "demo": demo.demo,
    "certify": certify.certify,
    "report": report.report,
    "audit": audit.audit,
    "attack": attack.attack,
    "predict": predict.predict,
    "serve": serve.serve,
    "masks": masks.masks,
    "data": data.data,
    "models": models.models,
    "train": train.train,
    "harden": harden.harden,
    "reproduce": reproduce.reproduce,
}
for name, command in COMMANDS.items():
    app.command(name)(_stoppable(command))


def _version(asked: bool) -> None:
    if asked:
        print(f"patchcleanser {patchcleanser.__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Say which.")] = False,
) -> None:
    """Certified defense of any image classifier against adversarial patches."""


def main() -> None:
    """Run the command line; our errors become one sentence, Ctrl-C the command that continues."""
    console = Console(stderr=True, highlight=False)
    try:
        app()
    except PatchCleanserError as error:
        console.print("error:", style="bold red", end=" ")
        console.print(str(error), markup=False, soft_wrap=True)  # a path or an extra may look like markup
        sys.exit(2)
    except (StoppedError, KeyboardInterrupt):
        again = shlex.join(["patchcleanser", *sys.argv[1:]])
        console.print("\nstopped. The same command goes on from what was kept:", markup=False)
        console.print(f"  {again}", markup=False, soft_wrap=True)
        sys.exit(130)
