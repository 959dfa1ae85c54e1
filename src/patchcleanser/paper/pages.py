"""The page of all experiments, for people: HTML beside the tables, and Markdown for the documentation."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from patchcleanser.paper import EXPERIMENTS
from patchcleanser.paper.base import Experiment, Finding
from patchcleanser.paper.collecting import read_found
from patchcleanser.paper.tabling import claim_lines, experiment_figure, experiment_table
from patchcleanser.records.atomic import whole_file
from patchcleanser.reports import page as report_page
from patchcleanser.reports.drawing import Drawing, inline, save
from patchcleanser.reports.tables import Table, interval_of, markdown_text, text_of, to_markdown, write_tables

HERE = Path(__file__).parent
SHOWN = 3
"""So many models that are not here are named; the rest is counted."""


@dataclass(frozen=True)
class Section:
    """What is shown of one experiment."""

    experiment: Experiment
    table: Table
    figure: Drawing | None
    claims: list[str]
    absent: str
    circumstances: str

    @property
    def noted(self) -> tuple[Table, list[str]]:
        """The table as pages show it, and its notes: why rows differ, each sentence told once below and numbered."""
        notes = list(dict.fromkeys(str(row["why"]) for row in self.table.rows))
        rows = [{**row, "why": str(notes.index(str(row["why"])) + 1)} for row in self.table.rows]
        columns = tuple(replace(c, title="Why") if c.key == "why" else c for c in self.table.shown().columns)
        return replace(self.table, columns=columns, rows=rows), notes


def section(experiment: Experiment, found: Mapping[str, Finding]) -> Section:
    """An experiment's table, figure and sentences; lines without a finding are only counted."""
    return Section(
        experiment,
        experiment_table(experiment, found),
        experiment_figure(experiment, found),
        claim_lines(experiment, found),
        absent(experiment, found),
        circumstances(found.values()),
    )


def absent(experiment: Experiment, found: Mapping[str, Finding]) -> str:
    """Which models' lines are declared but not measured yet, in a sentence; nothing if none."""
    left = [line for line in experiment.lines if line.key not in found]
    names = list(dict.fromkeys(line.plan.model for line in left))
    if not names:
        return ""
    named = ", ".join(names[:SHOWN]) + (f" and {len(names) - SHOWN} other models" if len(names) > SHOWN else "")
    return f"Declared and not measured yet: {len(left)} of {len(experiment.lines)} lines ({named})."


def circumstances(found: Iterable[Finding]) -> str:
    """On what, with which versions and by which commands the findings came about."""
    origins = [finding.origin for finding in found]
    machines = dict.fromkeys(_machine(origin) for origin in origins)
    commands = dict.fromkeys(str(origin["command"]) for origin in origins if "command" in origin)
    told = [f"Measured on {'; '.join(machines)}."] if machines else []
    made = [f"Rows made by {', '.join(f'`{command}`' for command in commands)}."] if commands else []
    return " ".join([*told, *made])


def _machine(origin: Mapping[str, object]) -> str:
    versions = origin.get("versions")
    known = versions if isinstance(versions, dict) else {}
    words = [str(origin.get("device", "")), str(known.get("hardware", ""))]
    packages = [
        f"{name} {known[name]}" for name in ("patchcleanser", "torch", "timm", "numpy", "python") if name in known
    ]
    seed = [f"seed {origin['seed']}"] if "seed" in origin else []
    return ", ".join([*dict.fromkeys(filter(None, words)), *packages, *seed])


def write_section(made: Section, out: Path) -> None:
    """Its table as CSV, Markdown and LaTeX, and its figure as SVG and PNG."""
    if made.table.rows:
        write_tables([made.table], out / "tables")
    if made.figure is not None:
        save(made.figure, out / "figures")


def write_page(sections: Sequence[Section], out: Path) -> Path:
    """results.html: one file with everything that was found."""
    jinja = Environment(
        loader=FileSystemLoader([HERE, Path(report_page.__file__).parent]),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    jinja.filters.update(number=text_of, interval=interval_of, svg=lambda drawing: Markup(inline(drawing)), code=_code)
    css = Markup((Path(report_page.__file__).parent / "page.css").read_text(encoding="utf-8"))
    target = out / "results.html"
    with whole_file(target) as part:
        text = jinja.get_template("results.html.jinja").render(sections=sections, css=css)
        part.write_text(text, encoding="utf-8", errors="replace")
    return target


def _code(text: str) -> Markup:
    """Text whose parts between backquotes are commands."""
    parts = re.split(r"`([^`]*)`", text)
    return Markup("").join(Markup("<code>{}</code>").format(p) if n % 2 else p for n, p in enumerate(parts))


HEAD = """# The paper's tables and figures, ours beside them

<!-- Written by `patchcleanser reproduce --page docs/results/paper.md --out results/reproduce`. Do not edit. -->

Every table and figure of the paper's evaluation is declared in `src/patchcleanser/paper/`, and
`patchcleanser reproduce NAME` measures what the models and images at hand allow ([how](reproduce.md)). Shares are in
percent with 95% intervals; where a row was measured on a part of the images, it says so. The paper certifies CIFAR on
an enlarged input; [another patch](../internals/pixel-grids.md) than one on the image. Seconds are of the wall clock, on CPUs that
others used at the same time; milliseconds to answer are processor time there.
"""


def results_page(out: Path) -> str:
    """The Markdown page of every finding that a folder holds."""
    kept = {name: read_found(out, name) for name in EXPERIMENTS}
    return markdown([section(EXPERIMENTS[name], found) for name, found in kept.items()])


def markdown(sections: Sequence[Section]) -> str:
    """All findings as one Markdown page."""
    parts = [HEAD]
    for made in sections:
        experiment = made.experiment
        parts.append(f"## {experiment.paper}: {experiment.title} (`{experiment.name}`)\n\n{experiment.says}\n")
        if made.table.rows:
            table, notes = made.noted
            parts.append(to_markdown(table).split("\n\n", 1)[1])
            parts.append(
                "Why it differs:\n\n"
                + "\n".join(f"{n}. {markdown_text(note)}" for n, note in enumerate(notes, 1))
                + "\n"
            )
        parts += ["\n".join(f"- {markdown_text(line)}" for line in made.claims) + "\n"] if made.claims else []
        parts += [f"{text}\n" for text in (made.absent, made.circumstances) if text]
    return "\n".join(parts)
