"""--config: options of a command from a TOML file, or those that a run was written with."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import typer

from patchcleanser.cli.help import GROUP_OF, option_name
from patchcleanser.errors import InputError, did_you_mean

NOT_IN_FILES = {"config", "help", "trust-code"}
"""Options that count only where they are typed. A file must not say that it may be trusted."""
REPEATED = ("certify", "attack", "demo")
"""Commands that store their options in runs. Others take none from there: what they load may be a stranger's."""
NOT_IN_RUNS = {"dry-run", "json", "out", "quiet", "traceback"}
"""Options of one call, which a run does not repeat. Neither does it say where it is computed."""


@dataclass(frozen=True)
class Call:
    """The options a command was called with, by the names that are typed."""

    command: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)
    run: Path | None = None
    """The run that --config names."""
    read: frozenset[str] = frozenset()
    """The options that were read from it, or from a TOML file."""

    def metadata(self) -> dict[str, Any]:
        """What a run stores of it: the command, versions, and the options, so that it can be repeated."""
        from patchcleanser.records.provenance import origin

        return {**origin(), "options": {self.command: dict(self.options)} if self.command else {}}

    def named_by(self, name: str) -> Path | None:
        """The run that an option was read from. Its author may be a stranger, so it must not name code to run."""
        return self.run if name in self.read else None


_CALL: ContextVar[Call] = ContextVar("call", default=Call())  # noqa: B039  # it is frozen


def call() -> Call:
    """The call that this process works on."""
    return _CALL.get()


@contextmanager
def calling(context: typer.Context) -> Iterator[None]:
    """Make this the current call."""
    values = {name: context.params.get(option.name) for name, option in _options(context).items()}
    stored = {name: value for name, value in values.items() if value is not None and _stored(name, context)}
    plain = {name: str(value) if isinstance(value, Path) else value for name, value in stored.items()}
    sources = {name: context.get_parameter_source(option.name) for name, option in _options(context).items()}
    read = frozenset(name for name, source in sources.items() if source is not None and source.name == "DEFAULT_MAP")
    token = _CALL.set(Call(str(context.info_name), plain, context.meta.get(__name__), read))
    try:
        yield
    finally:
        _CALL.reset(token)


def read_config(context: typer.Context, path: Path | None) -> Path | None:
    """Make the options in a file the defaults of a command; what is typed wins."""
    if path is None or context.resilient_parsing:
        return path
    options, command = _options(context), str(context.info_name)
    values, run = _read(path, command, context)
    defaults = {}
    for key, value in values.items():
        name = option_name(key)
        usable = [other for other in options if other not in NOT_IN_FILES and (run is None or _stored(other, context))]
        if name not in usable:
            why = "can only be typed" if name in options else f"is no option of {command}"
            raise InputError(f"{path}: {key} {why}{did_you_mean(name, usable)}")
        defaults[options[name].name] = _as_typed(value, options[name].multiple)
    context.default_map = defaults
    context.meta[__name__] = run
    return path


def _options(context: typer.Context) -> dict[str, Any]:
    """The options of a command, by their long names without dashes."""
    parameters = [p for p in context.command.params if p.param_type_name == "option"]
    return {next(flag for flag in p.opts if flag.startswith("--"))[2:]: p for p in parameters}


def _stored(name: str, context: typer.Context) -> bool:
    """Whether a run stores this option."""
    elsewhere = GROUP_OF.get(str(_options(context)[name].name)) == "Where it runs" and name != "device"
    return name not in NOT_IN_FILES | NOT_IN_RUNS and not elsewhere


def _read(path: Path, command: str, context: typer.Context) -> tuple[dict[str, Any], Path | None]:
    """The options of a command in a file, and the run if the file is one."""
    from patchcleanser.records.provenance import MANIFEST, read_manifest

    if path.is_dir() or path.name == MANIFEST:
        folder = path if path.is_dir() else path.parent
        if command not in REPEATED:
            raise InputError(f"{folder} is a run, and {command} takes no options from one; write them into a TOML file")
        stored = read_manifest(folder)["about"].get("options")
        if not isinstance(stored, dict) or not isinstance(stored.get(command), dict):
            written = f"of {', '.join(stored)}" if isinstance(stored, dict) and stored else "of no command"
            raise InputError(f"{folder} holds options {written}, not of {command}")
        return stored[command], folder
    values = _parse(path)
    tables = {name: value for name, value in values.items() if isinstance(value, dict)}
    commands = list(getattr(context.parent and context.parent.command, "commands", [command]))
    for name in tables.keys() - set(commands):
        raise InputError(f"{path}: [{name}] is no command{did_you_mean(name, commands)}")
    return {key: value for key, value in values.items() if key not in tables} | tables.get(command, {}), None


def _parse(path: Path) -> dict[str, Any]:
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:
        raise InputError(f'{path} is no TOML file of options, such as patch = "2%": {error}') from error


def _as_typed(value: Any, multiple: bool) -> Any:
    """A value as the command line would hold it: text, flags, and lists of text."""
    if multiple:
        return [str(part) for part in (value if isinstance(value, list) else [value])]
    if isinstance(value, list):
        return ",".join(map(str, value))
    return value if isinstance(value, bool) else str(value)
