"""Measurements for people: a table, a figure and sentences for each experiment, on one HTML or Markdown page."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup
from matplotlib.ticker import MaxNLocator

from patchcleanser.paper import EXPERIMENTS
from patchcleanser.paper.experiments import MASKING, Axis, Experiment, Measurement, PaperRow, percent
from patchcleanser.paper.measurements import read_measurements
from patchcleanser.paper.models import LOW, PAPER_DATASETS, find_model
from patchcleanser.records.atomic import whole_file
from patchcleanser.reports import page as report_page
from patchcleanser.reports import tables, wording
from patchcleanser.reports.drawing import ACCENT, INK, MUTED, SOFT, Drawing, blank, inline, save, style
from patchcleanser.reports.sweeps import add_legend
from patchcleanser.reports.tables import Cell, Column, Table

LOOKS = ((ACCENT, "o"), (INK, "s"), (MUTED, "^"), (SOFT, "D"))
DASHES = ("-", "--", "-.", ":")
"""How the lines of one model are drawn."""
FACETS = ("defense", "model", "data", "patch", "masks")
_TITLES = {"device": "Device", "precision": "Labels", "seed": "Seed", "run": "Run", "command": "Command"}
PROVENANCE = tuple(Column(key, title, page=False) for key, title in _TITLES.items())


@dataclass(frozen=True)
class Section:
    """One experiment with its measurements by row key, as pages show it; rows without one are only counted."""

    experiment: Experiment
    measurements: Mapping[str, Measurement]

    @property
    def measured(self) -> list[tuple[PaperRow, Measurement]]:
        return [(row, self.measurements[row.key]) for row in self.experiment.rows if row.key in self.measurements]

    @cached_property
    def table(self) -> Table:
        """The measured rows: each measure as printed and as measured, and why they differ."""
        experiment = self.experiment
        rows = [_cells(row, measurement) for row, measurement in self.measured]
        columns = [
            Column(name, name.capitalize())
            for name in FACETS
            if name in ("model", "data") or len({row[name] for row in rows}) > 1
        ]
        if experiment.variant:
            columns.append(Column("variant", experiment.variant))
        for measure in experiment.measures:
            title = f"{measure.title.removesuffix(', %')}, paper"
            columns += [Column(f"paper_{measure.key}", title, measure.digits), measure]
        columns += [Column("images", "Images"), Column("why", "Why it differs"), *PROVENANCE]
        caption = f"{experiment.paper}: {experiment.title}, ours with 95% intervals"
        return Table(experiment.name, caption, tuple(columns), rows, stacks=True).without_empty()

    @property
    def numbered(self) -> tuple[Table, list[str]]:
        """The table with numbers for the reasons why rows differ, and each reason once, in that order."""
        reasons = list(dict.fromkeys(str(row["why"]) for row in self.table.rows))
        rows = [{**row, "why": str(reasons.index(str(row["why"])) + 1)} for row in self.table.rows]
        columns = tuple(replace(c, title="Why") if c.key == "why" else c for c in self.table.shown().columns)
        return replace(self.table, columns=columns, rows=rows), reasons

    @property
    def claims(self) -> list[str]:
        """For each of the paper's claims and each measured group: whether it holds, with the numbers."""
        return [
            f"{claim.text}: {'yes' if holds else 'NO'} for {', '.join(group)} ({numbers})."
            for claim in self.experiment.claims
            for holds, group, numbers in claim.check(self.measured)
        ]

    @property
    def footnotes(self) -> list[str]:
        """How many rows are not measured yet; machines, versions and commands behind the others."""
        models = [row.spec.model for row in self.experiment.rows if row.key not in self.measurements]
        names = list(dict.fromkeys(models))
        listed = ", ".join(names[:3]) + (f" and {len(names) - 3} other models" if len(names) > 3 else "")
        origins = [measurement.origin for measurement in self.measurements.values()]
        machines = dict.fromkeys(_machine(origin) for origin in origins)
        commands = dict.fromkeys(f"`{origin['command']}`" for origin in origins if "command" in origin)
        sentences = [f"Measured on {'; '.join(machines)}."] if machines else []
        sentences += [f"Rows made by {', '.join(commands)}."] if commands else []
        total = len(self.experiment.rows)
        unmeasured = [f"Declared and not measured yet: {len(models)} of {total} lines ({listed})."] if models else []
        return [*unmeasured, *([" ".join(sentences)] if sentences else [])]

    @cached_property
    def figure(self) -> Drawing | None:
        """The measures against the experiment's axis, a line for each model and measure; None if there is no line."""
        axis = self.experiment.axis
        lines = {} if axis is None else self._lines(axis)
        if axis is None or not lines:
            return None
        with style():
            figure, axes = blank(height=3.1)
            for number, ((group, measure), points) in enumerate(lines.items()):
                colour, marker = LOOKS[axis.measures.index(measure) % len(LOOKS)]
                dashes = DASHES[number // len(axis.measures) % len(DASHES)]
                x, y = zip(*points, strict=True)
                label = f"{measure.replace('_', ' ')}, {group}"
                axes.plot(x, y, dashes, marker=marker, color=colour, label=label, markersize=4.5, clip_on=False)
            if axis.log:
                axes.set_xscale("log")
            elif all(x.is_integer() for points in lines.values() for x, _ in points):
                axes.xaxis.set_major_locator(MaxNLocator(integer=True))
            axes.set_ylim(0, 100)
            axes.set_xlabel(axis.title)
            axes.set_ylabel("percent of the images")
            add_legend(figure, axes, [str(line.get_label()) for line in axes.get_lines()])
            name, title = self.experiment.name, self.experiment.title
            caption = f"{self.experiment.paper} of the paper, on our data: {self.experiment.takeaway}"
            return Drawing(name, title, caption, f"{title} against {axis.title}", figure)

    def _lines(self, axis: Axis) -> dict[tuple[str, str], list[tuple[float, float]]]:
        """Points from left to right by model and measure; a line needs two."""
        lines: dict[tuple[str, str], list[tuple[float, float]]] = {}
        for row, measurement in self.measured:
            x = axis.position(row, measurement)
            group = f"{row.spec.model}, {PAPER_DATASETS[row.spec.data].title}"
            for measure in axis.measures:
                y = percent(measurement.values.get(measure, math.nan))
                if not math.isnan(x) and not math.isnan(y):
                    lines.setdefault((group, measure), []).append((x, y))
        return {key: sorted(points) for key, points in lines.items() if len(points) > 1}

    def write(self, out: Path) -> None:
        """Write the table as CSV, Markdown and LaTeX, and the figure as SVG and PNG."""
        if self.table.rows:
            tables.write_tables([self.table], out / "tables")
        if self.figure is not None:
            save(self.figure, out / "figures")


def _cells(row: PaperRow, measurement: Measurement) -> dict[str, Cell]:
    spec = row.spec
    return {
        "defense": wording.defense_title(spec.defense),
        "model": spec.model,
        "data": PAPER_DATASETS[spec.data].title,
        "patch": wording.patch(spec.threat),
        "masks": f"{spec.masks}×{spec.masks}" if spec.defense == MASKING else "none",
        "variant": row.variant or None,
        **measurement.values,
        **{f"paper_{key}": value for key, value in row.printed.items()},
        "images": measurement.images,
        "why": why_different(row, measurement),
        **{column.key: measurement.origin.get(column.key) for column in PROVENANCE},
    }


def why_different(row: PaperRow, measurement: Measurement) -> str:
    """One sentence on why our number is not the paper's."""
    spec, model = row.spec, find_model(row.spec.model)
    images, total = measurement.origin.get("of", measurement.images), spec.images or PAPER_DATASETS[spec.data].images
    sample = [f"{images:,} images instead of {total:,}"] if images < total else []
    clock = _clock(measurement)
    if spec.kind == "time":
        hardware = measurement.origin.get("versions", {}).get("hardware", "another machine")
        parts = [f"measured on {hardware}, the paper's on one RTX 2080 Ti at 224×224", *clock, model.difference]
    elif spec.defense != MASKING and not row.printed:
        parts = ["the paper does not compare it", model.difference, *sample]
    elif not row.printed:
        parts = ["the paper draws this without printing a number", *sample, *clock]
    else:
        parts = [model.difference]
        if spec.data in LOW and spec.grid == "source":
            parts.append("the patch lies on the 32×32 pixels themselves, the paper's on the enlarged input")
        parts += [*sample, *clock]
    text = "; ".join(parts)
    return f"{text[0].upper()}{text[1:]}."


def _clock(measurement: Measurement) -> list[str]:
    """The clock of measured times, and the load of a shared machine, on which times are too long."""
    if "milliseconds" not in measurement.values:
        return []
    load = measurement.origin.get("load")
    busy = f", while {load:g} processes wanted the machine's cores" if load else ""
    return [f"times are {measurement.origin.get('clock', 'of the wall clock')}{busy}"]


def _machine(origin: Mapping[str, object]) -> str:
    versions = origin.get("versions")
    versions = versions if isinstance(versions, dict) else {}
    hardware = [str(origin.get("device", "")), str(versions.get("hardware", ""))]
    names = ("patchcleanser", "torch", "timm", "numpy", "python")
    packages = [f"{name} {versions[name]}" for name in names if name in versions]
    seed = [f"seed {origin['seed']}"] if "seed" in origin else []
    return ", ".join([*dict.fromkeys(filter(None, hardware)), *packages, *seed])


def write_page(sections: Sequence[Section], out: Path) -> Path:
    """Write all sections into results.html, a page that needs no other file."""
    folder = Path(report_page.__file__).parent
    jinja = Environment(
        loader=FileSystemLoader([Path(__file__).parent, folder]),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    jinja.filters.update(number=tables.text_of, interval=tables.interval_of, code=_code)
    jinja.filters["svg"] = lambda drawing: Markup(inline(drawing))
    css = Markup((folder / "page.css").read_text(encoding="utf-8"))
    target = out / "results.html"
    with whole_file(target) as part:
        text = jinja.get_template("results.html.jinja").render(sections=sections, css=css)
        part.write_text(text, encoding="utf-8", errors="replace")
    return target


def _code(text: str) -> Markup:
    """Text to HTML; parts between backquotes become code."""
    parts = re.split(r"`([^`]*)`", text)
    return Markup("").join(Markup("<code>{}</code>").format(p) if n % 2 else p for n, p in enumerate(parts))


HEAD = """# The paper's tables and figures, ours beside them

<!-- Written by `patchcleanser reproduce --page docs/results/paper.md --out results/reproduce`. Do not edit. -->

Every table and figure of the paper's evaluation is declared in `src/patchcleanser/paper/`, and
`patchcleanser reproduce NAME` measures what the models and images at hand allow ([how](reproduce.md)). Shares are in
percent with 95% intervals. A row that was measured on a part of the images says so. The paper certifies CIFAR on an
enlarged input, which is [another patch](../internals/pixel-grids.md) than one on the image. Seconds are of the wall
clock, on CPUs that others used at the same time. Milliseconds to answer are processor time there.
"""


def results_page(folder: Path) -> str:
    """All measurements in a folder as one Markdown page."""
    parts = [HEAD]
    for name, experiment in EXPERIMENTS.items():
        section = Section(experiment, read_measurements(folder, name))
        parts.append(f"## {experiment.paper}: {experiment.title} (`{name}`)\n\nThe paper says: {experiment.takeaway}\n")
        if section.claims:
            parts.append("\n".join(f"- {tables.markdown_text(line)}" for line in section.claims) + "\n")
        if section.table.rows:
            table, reasons = section.numbered
            groups = dict.fromkeys((row["defense"], row["data"]) for row in table.rows)
            parts += [_table_of(table, *group) for group in groups]
            listed = [f"{n}. {tables.markdown_text(reason)}" for n, reason in enumerate(reasons, 1)]
            parts.append(_folded("Why ours differs", "\n".join(listed)))
        if section.footnotes:
            parts.append(_folded("What is measured, on what, and how", "\n\n".join(section.footnotes)))
    return "\n".join(parts)


def _table_of(table: Table, defense: Cell, data: Cell) -> str:
    """The rows of one defense on one dataset; what all of them share stands above them instead of in columns."""
    rows = [row for row in table.rows if (row["defense"], row["data"]) == (defense, data)]
    names = ("defense", "data", "patch", "masks", "images")
    shared = {name: rows[0][name] for name in names if len({row[name] for row in rows}) == 1}
    columns = tuple(column for column in table.columns if column.key not in shared)
    group = replace(table, columns=columns, rows=rows).without_empty().without_copy("row_certified", "certified")
    units = {"masks": " masks", "images": " images"}
    texts = [tables.text_of(cell) + units.get(name, "") for name, cell in shared.items() if cell != "none"]
    return f"**{', '.join(texts)}**\n\n" + tables.to_markdown(group.shown()).split("\n\n", 1)[1]


def _folded(title: str, text: str) -> str:
    """Markdown behind a title that opens it."""
    return f'<details markdown="1"><summary>{title}</summary>\n\n{text}\n\n</details>\n'
