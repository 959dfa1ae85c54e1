"""The `patchcleanser` command and how it ends: an answer, a clear error, or a clean stop."""

from __future__ import annotations

import functools
import logging
import shlex
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import MISSING, fields, is_dataclass
from inspect import Parameter, Signature, signature
from typing import Annotated, Any, get_type_hints

import typer
from rich.console import Console
from typer.core import TyperCommand

import patchcleanser
from patchcleanser.cli.attack import attack
from patchcleanser.cli.audit import audit
from patchcleanser.cli.catalog import data, models
from patchcleanser.cli.certify import certify
from patchcleanser.cli.claim import claim
from patchcleanser.cli.config import calling
from patchcleanser.cli.demo import demo
from patchcleanser.cli.harden import harden
from patchcleanser.cli.help import dashed, epilog, group_order, option_name, presented, require_choices
from patchcleanser.cli.masks import masks
from patchcleanser.cli.options import CommonOptions
from patchcleanser.cli.predict import predict
from patchcleanser.cli.price import price
from patchcleanser.cli.progress import notes
from patchcleanser.cli.report import report
from patchcleanser.cli.reproduce import reproduce
from patchcleanser.cli.serve import serve
from patchcleanser.cli.train import train
from patchcleanser.errors import InputError, PatchCleanserError
from patchcleanser.records.atomic import KeptInterrupt

app = typer.Typer(
    name="patchcleanser",
    help="Certified defense of any image classifier against adversarial patches.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "token_normalize_func": dashed},
)


class HabitCommand(TyperCommand):
    """A command that takes options by the names that other tools have for them, and no other command's."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        own = {flag for parameter in self.params for flag in parameter.opts}
        return super().parse_args(ctx, [_usual(word, own) for word in args])


def _usual(word: str, own: set[str]) -> str:
    """A word of the command line with our name of an option, if the command has it."""
    name, equals, value = word.partition("=")
    usual = f"--{option_name(name[2:])}"
    return f"{usual}{equals}{value}" if name[:2] == "--" and usual in own else word


CONTINUED = {"demo", "certify", "attack", "train", "harden", "reproduce"}
"""Commands that go on from what an earlier try wrote; the others start again."""
GOES_ON = ". The same command goes on from what was kept:"
NOTHING_NEW = ". Nothing new was kept; the same command begins where this one began:"


class StoppedError(Exception):
    """Ctrl-C in the command that it names. Typer would swallow KeyboardInterrupt itself."""

    def __init__(self, command: str, *, resumable: bool = False) -> None:
        super().__init__(command)
        self.resumable = resumable
        """Whether the command wrote something from which it goes on."""


def as_command(function: Callable[..., None]) -> Callable[..., None]:
    """Make a function a command for Typer: options in dataclasses become single options, Ctrl-C a StoppedError.

    Every command also gets CommonOptions. A parameter whose type is a dataclass is replaced by the dataclass's fields,
    so that options shared by several commands are declared once:

        @dataclass(frozen=True)
        class RunnerOptions:
            on: Annotated[str, typer.Option(help="here or ray")] = "here"

        def certify(cluster: RunnerOptions, table: bool = False): ...     # certify --on ray --table
    """
    hints = get_type_hints(function, include_extras=True)
    groups = {name: hint for name, hint in hints.items() if is_dataclass(hint) and isinstance(hint, type)}
    groups["common"] = CommonOptions
    parameters = [Parameter("context", Parameter.KEYWORD_ONLY, annotation=typer.Context)]
    common = Parameter("common", Parameter.KEYWORD_ONLY)
    for parameter in [*signature(function).parameters.values(), common]:
        if parameter.name in groups:
            group = groups[parameter.name]
            types = get_type_hints(group, include_extras=True)
            for field in fields(group):
                default = Parameter.empty if field.default is MISSING else field.default
                option = Parameter(field.name, Parameter.KEYWORD_ONLY, default=default, annotation=types[field.name])
                parameters.append(presented(option))
        else:
            option = parameter.replace(kind=Parameter.KEYWORD_ONLY, annotation=hints[parameter.name])
            parameters.append(presented(option))

    @functools.wraps(function)
    def command(context: typer.Context, **options: Any) -> None:
        require_choices(options)
        level = logging.WARNING if options.get("as_json") else logging.INFO
        with calling(context), notes(logging.ERROR if options["quiet"] else level):
            for name, group in groups.items():
                options[name] = group(**{field.name: options.pop(field.name) for field in fields(group)})
            del options["common"]
            try:
                function(**options)
            except KeyboardInterrupt as stop:
                raise StoppedError(function.__name__, resumable=isinstance(stop, KeptInterrupt)) from None

    parameters.sort(key=group_order)
    command.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return command


_functions: list[Callable[..., None]] = [demo, certify, report, audit, attack, predict, price, serve]
_functions += [masks, data, models, train, harden, reproduce, claim]
COMMANDS = {function.__name__: function for function in _functions}
"""In the order of --help."""
for name, function in COMMANDS.items():
    app.command(name, cls=HabitCommand, epilog=epilog(name))(as_command(function))


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"patchcleanser {patchcleanser.__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Certified defense of any image classifier against adversarial patches."""


def main() -> None:
    """Run the command line. Our errors become one sentence; Ctrl-C prints the command that goes on, if it does."""
    console = Console(stderr=True, highlight=False)
    try:
        with terminable():
            _run()
    except PatchCleanserError as error:
        if "--traceback" in sys.argv:
            raise
        console.print("error:", style="bold red", end=" ")
        console.print(str(error), markup=False, soft_wrap=True)  # a path or an extra may look like markup
        sys.exit(2)
    except (StoppedError, KeyboardInterrupt) as stop:
        words = NOTHING_NEW if str(stop) in CONTINUED else ""
        words = GOES_ON if isinstance(stop, StoppedError) and stop.resumable else words
        console.print(f"\nstopped{words}", soft_wrap=True)
        if words:
            console.print(f"  {shlex.join(['patchcleanser', *sys.argv[1:]])}", markup=False, soft_wrap=True)
        sys.exit(INTERRUPTED)


INTERRUPTED = 128 + signal.SIGINT
"""The exit code of a command that was stopped."""


@contextmanager
def terminable() -> Iterator[None]:
    """Make SIGTERM, which `kill` and job schedulers send, end a command as Ctrl-C does."""
    if threading.current_thread() is not threading.main_thread():  # only that one may set a handler
        yield
        return

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _run() -> None:
    """Run what the command line says; KeyboardInterrupt for Ctrl-C before a command began, which Typer keeps quiet."""
    try:
        if sys.argv[1:2] and sys.argv[1] in ("--install-completion", "--show-completion") and sys.argv[2:]:
            raise InputError(f"{sys.argv[1]} takes no word: it is for the shell that runs it, got {sys.argv[2]!r}")
        app()
    except SystemExit as end:
        if end.code == INTERRUPTED:
            raise KeyboardInterrupt from end
        raise
