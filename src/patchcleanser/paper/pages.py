"""Measurements for people: a table, a figure and sentences for each experiment, on one HTML or Markdown page."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup
from matplotlib.ticker import MaxNLocator

from patchcleanser.paper import EXPERIMENTS
from patchcleanser.paper.catalog import LOW, PAPER_DATASETS, find_model
from patchcleanser.paper.claims import check_claim
from patchcleanser.paper.experiments import MASKING, Axis, Experiment, Measurement, PaperRow, percent
from patchcleanser.paper.measurements import read_measurements
from patchcleanser.records.atomic import whole_file
from patchcleanser.reports import page as report_page
from patchcleanser.reports import wording
from patchcleanser.reports.drawing import ACCENT, INK, MUTED, SOFT, Drawing, blank, inline, save, settled, style
from patchcleanser.reports.tables import (
    Cell,
    Column,
    Table,
    interval_of,
    markdown_text,
    text_of,
    to_markdown,
    write_tables,
)

LOOKS = ((ACCENT, "o"), (INK, "s"), (MUTED, "^"), (SOFT, "D"))
NAMED_MODELS = 3
"""Models without measurements that are named; the rest is counted."""
FACETS = ("Defense", "Model", "Data", "Patch", "Masks")
PROVENANCE = tuple(
    Column(key, title, page=False)
    for key, title in {
        "device": "Device",
        "precision": "Labels",
        "seed": "Seed",
        "run": "Run",
        "command": "Command",
    }.items()
)


@dataclass(frozen=True)
class Section:
    """What a page shows of one experiment."""

    experiment: Experiment
    table: Table
    figure: Drawing | None
    claims: list[str]
    footnotes: list[str]

    @property
    def numbered(self) -> tuple[Table, list[str]]:
        """The table with numbers for the reasons why rows differ, and each reason once, in that order."""
        reasons = list(dict.fromkeys(str(row["why"]) for row in self.table.rows))
        rows = [{**row, "why": str(reasons.index(str(row["why"])) + 1)} for row in self.table.rows]
        columns = tuple(replace(c, title="Why") if c.key == "why" else c for c in self.table.shown().columns)
        return replace(self.table, columns=columns, rows=rows), reasons


def make_section(experiment: Experiment, measurements: Mapping[str, Measurement]) -> Section:
    """The section of an experiment; rows without a measurement are only counted."""
    return Section(
        experiment,
        experiment_table(experiment, measurements),
        experiment_figure(experiment, measurements),
        claim_lines(experiment, measurements),
        [text for text in (_unmeasured(experiment, measurements), _circumstances(measurements.values())) if text],
    )


def experiment_table(experiment: Experiment, measurements: Mapping[str, Measurement]) -> Table:
    """The measured rows: each measure as printed and as measured, and why they differ."""
    measured = experiment.measured(measurements)
    facets = [_facets(row) for row, _ in measured]
    varying = [name for name in FACETS if len({facet[name] for facet in facets}) > 1 or name in ("Model", "Data")]
    columns = [Column(name.lower(), name) for name in varying]
    if experiment.variant:
        columns.append(Column("variant", experiment.variant))
    for measure in experiment.measures:
        if measure.key != "images":
            title = f"{measure.title.removesuffix(', %')}, paper"
            columns += [Column(f"paper_{measure.key}", title, measure.digits), measure]
    columns += [Column("images", "Images"), Column("why", "Why it differs"), *PROVENANCE]
    rows = [_cells(row, measurement, facet) for (row, measurement), facet in zip(measured, facets, strict=True)]
    caption = f"{experiment.paper}: {experiment.title}, ours with 95% intervals"
    return Table(experiment.name, caption, tuple(columns), rows, stacks=True).without_empty()


def _facets(row: PaperRow) -> dict[str, str]:
    spec = row.spec
    return {
        "Defense": wording.defense_title(spec.defense),
        "Model": spec.model,
        "Data": PAPER_DATASETS[spec.data].title,
        "Patch": wording.patch(spec.threat),
        "Masks": f"{spec.masks}×{spec.masks}" if spec.defense == MASKING else "none",
    }


def _cells(row: PaperRow, measurement: Measurement, facets: Mapping[str, str]) -> dict[str, Cell]:
    return {
        **{name.lower(): value for name, value in facets.items()},
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
    clock, sample = _clock(measurement), _sample(spec.images or PAPER_DATASETS[spec.data].images, measurement)
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


def _sample(total: int, measurement: Measurement) -> list[str]:
    images = measurement.origin.get("of", measurement.images)
    return [f"{images:,} images instead of {total:,}"] if images < total else []


def claim_lines(experiment: Experiment, measurements: Mapping[str, Measurement]) -> list[str]:
    """For each of the paper's claims and each measured group: whether it holds, with the numbers."""
    measured = experiment.measured(measurements)
    return [
        f"{claim.text}: {'yes' if holds else 'NO'} for {', '.join(group)} ({numbers})."
        for claim in experiment.claims
        for holds, group, numbers in check_claim(claim, measured)
    ]


def experiment_figure(experiment: Experiment, measurements: Mapping[str, Measurement]) -> Drawing | None:
    """The measures against the experiment's axis, a line for each model and measure; None if there is no line."""
    axis = experiment.axis
    lines = {} if axis is None else _lines(experiment, axis, measurements)
    if axis is None or not lines:
        return None
    with style():
        figure, axes = blank(height=3.1)
        for number, ((group, measure), points) in enumerate(lines.items()):
            colour, marker = LOOKS[axis.measures.index(measure) % len(LOOKS)]
            alpha = 1 - 0.5 * (number // len(axis.measures)) / max(1, len(lines) // len(axis.measures))
            x, y = zip(*points, strict=True)
            label = f"{measure.replace('_', ' ')}, {group}"
            axes.plot(x, y, marker=marker, color=colour, alpha=alpha, label=label, markersize=4.5, clip_on=False)
        if axis.log:
            axes.set_xscale("log")
        elif all(x.is_integer() for points in lines.values() for x, _ in points):
            axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.set_ylim(0, 100)
        axes.set_xlabel(axis.title)
        axes.set_ylabel("percent of the images")
        columns = 2 if len(lines) > 2 else 1
        figure.legend(loc="outside upper left", ncols=columns)
        figure.set_figheight(3.1 + 0.19 * -(-len(lines) // columns))
        caption = f"{experiment.paper} of the paper, on our data: {experiment.takeaway}"
        title = f"{experiment.title} against {axis.title}"
        return settled([Drawing(experiment.name, experiment.title, caption, title, figure)])[0]


def _lines(
    experiment: Experiment, axis: Axis, measurements: Mapping[str, Measurement]
) -> dict[tuple[str, str], list[tuple[float, float]]]:
    """Points from left to right by model and measure; a line needs two."""
    lines: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for row, measurement in experiment.measured(measurements):
        x = axis.position(row, measurement)
        group = f"{row.spec.model}, {PAPER_DATASETS[row.spec.data].title}"
        for measure in axis.measures:
            y = percent(measurement.values.get(measure, math.nan))
            if not math.isnan(x) and not math.isnan(y):
                lines.setdefault((group, measure), []).append((x, y))
    return {key: sorted(points) for key, points in lines.items() if len(points) > 1}


def _unmeasured(experiment: Experiment, measurements: Mapping[str, Measurement]) -> str:
    """How many rows have no measurement yet, and of which models; empty if none."""
    models = [row.spec.model for row in experiment.rows if row.key not in measurements]
    names = list(dict.fromkeys(models))
    if not names:
        return ""
    more = f" and {len(names) - NAMED_MODELS} other models" if len(names) > NAMED_MODELS else ""
    listed = ", ".join(names[:NAMED_MODELS]) + more
    return f"Declared and not measured yet: {len(models)} of {len(experiment.rows)} lines ({listed})."


def _circumstances(measurements: Iterable[Measurement]) -> str:
    """The machines, versions and commands behind measurements."""
    origins = [measurement.origin for measurement in measurements]
    machines = dict.fromkeys(_machine(origin) for origin in origins)
    commands = dict.fromkeys(f"`{origin['command']}`" for origin in origins if "command" in origin)
    sentences = [f"Measured on {'; '.join(machines)}."] if machines else []
    sentences += [f"Rows made by {', '.join(commands)}."] if commands else []
    return " ".join(sentences)


def _machine(origin: Mapping[str, object]) -> str:
    versions = origin.get("versions")
    versions = versions if isinstance(versions, dict) else {}
    hardware = [str(origin.get("device", "")), str(versions.get("hardware", ""))]
    names = ("patchcleanser", "torch", "timm", "numpy", "python")
    packages = [f"{name} {versions[name]}" for name in names if name in versions]
    seed = [f"seed {origin['seed']}"] if "seed" in origin else []
    return ", ".join([*dict.fromkeys(filter(None, hardware)), *packages, *seed])


def write_section(section: Section, out: Path) -> None:
    """Write the table as CSV, Markdown and LaTeX, and the figure as SVG and PNG."""
    if section.table.rows:
        write_tables([section.table], out / "tables")
    if section.figure is not None:
        save(section.figure, out / "figures")


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
    jinja.filters.update(number=text_of, interval=interval_of, svg=lambda drawing: Markup(inline(drawing)), code=_code)
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

<!-- Written by `patchcleanser reproduce --page docs/results.md --out results/reproduce`. Do not edit. -->

Every table and figure of the paper's evaluation is declared in `src/patchcleanser/paper/`, and
`patchcleanser reproduce NAME` measures what the models and images at hand allow ([how](reproduce.md)). Shares are in
percent with 95% intervals; where a row was measured on a part of the images, it says so. The paper certifies CIFAR on
an enlarged input; [grids.md](grids.md) says why that is not the same patch. Seconds are of the wall clock, on CPUs that
others used at the same time; milliseconds to answer are processor time there.
"""


def results_page(folder: Path) -> str:
    """All measurements in a folder as one Markdown page."""
    parts = [HEAD]
    for name, experiment in EXPERIMENTS.items():
        section = make_section(experiment, read_measurements(folder, name))
        parts.append(f"## {experiment.paper}: {experiment.title} (`{name}`)\n\n{experiment.takeaway}\n")
        if section.table.rows:
            table, reasons = section.numbered
            parts.append(to_markdown(table).split("\n\n", 1)[1])
            listed = "\n".join(f"{n}. {markdown_text(reason)}" for n, reason in enumerate(reasons, 1))
            parts.append(f"Why it differs:\n\n{listed}\n")
        if section.claims:
            parts.append("\n".join(f"- {markdown_text(line)}" for line in section.claims) + "\n")
        parts += [f"{text}\n" for text in section.footnotes]
    return "\n".join(parts)
