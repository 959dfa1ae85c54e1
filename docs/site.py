"""Hook of the docs site: the page of commands, written from their own --help."""

from __future__ import annotations

from typing import Any

import typer
from mkdocs.structure.files import File, Files

from patchcleanser.cli.app import app
from patchcleanser.cli.help import EXAMPLES
from patchcleanser.cli.options import CommonOptions

EVERYWHERE = """\
Every command also takes `--config FILE.toml` (`-c`), `--quiet` (`-q`), `--traceback` and `--help` (`-h`). See
[options in a file](../guide/certify.md#options-in-a-file). After `patchcleanser --install-completion` a shell completes
names."""


def on_files(files: Files, config: Any) -> Files:
    """Add the generated page."""
    files.append(File.generated(config, "reference/commands.md", content=command_page()))
    return files


def command_page() -> str:
    """Describe every command with its arguments and options."""
    group: Any = typer.main.get_command(app)
    parts = ["# Commands", group.help or "", "`patchcleanser COMMAND --help` prints the same."]
    parts.append(EVERYWHERE)
    for name, command in group.commands.items():
        context = command.make_context(f"patchcleanser {name}", [], resilient_parsing=True)
        parts += [f"## {name}", command.help or "", f"```text\n{command.get_usage(context)}\n```"]
        rows = [row for parameter in command.params if (row := option_row(parameter, context))]
        if rows:
            parts.append("\n".join(["| option | meaning | default |", "|---|---|---|", *rows]))
        parts.append("\n".join(["```bash", *(f"patchcleanser {example}" for example in EXAMPLES[name]), "```"]))
    return "\n\n".join(parts) + "\n"


def option_row(parameter: Any, context: Any) -> str | None:
    """One row of a command's table, or None for what every command has."""
    if parameter.name in ("help", *vars(CommonOptions())):
        return None
    names = ", ".join(f"`{flag}`" for flag in parameter.opts)
    default = parameter.get_default(context)
    shown = "" if default in (None, False, ()) else f"`{default}`"
    return f"| {names} | {(getattr(parameter, 'help', None) or '').replace('|', chr(92) + '|')} | {shown} |"
