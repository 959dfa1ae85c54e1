"""An experiment's findings as a table, a figure and sentences: ours beside the paper's, and why they differ."""

from __future__ import annotations

import math
from collections.abc import Mapping

from matplotlib.ticker import MaxNLocator

from patchcleanser.paper.base import MASKING, Axis, Experiment, Finding, Line, percent
from patchcleanser.paper.claims import told
from patchcleanser.paper.images import DATA
from patchcleanser.paper.models import LOW, model_of
from patchcleanser.reports import wording
from patchcleanser.reports.drawing import ACCENT, INK, MUTED, SOFT, Drawing, blank, style
from patchcleanser.reports.tables import Cell, Column, Table

LOOKS = ((ACCENT, "o"), (INK, "s"), (MUTED, "^"), (SOFT, "D"))


def experiment_table(experiment: Experiment, found: Mapping[str, Finding]) -> Table:
    """The measured lines, each measure once as printed and once as found, with the reason for a difference."""
    measured = [(line, found[line.key]) for line in experiment.lines if line.key in found]
    facets = [_facets(line) for line, _ in measured]
    varies = [name for name in FACETS if len({facet[name] for facet in facets}) > 1 or name in ("Model", "Data")]
    columns = [Column(name.lower(), name) for name in varies]
    if experiment.variant:
        columns.append(Column("variant", experiment.variant))
    for measure in experiment.measures:
        if measure.key != "images":
            columns += [Column(f"paper_{measure.key}", f"{_short(measure)}, paper", measure.digits), measure]
    columns += [Column("images", "Images"), Column("why", "Why it differs"), *PROVENANCE]
    rows = [_row(line, finding, facet) for (line, finding), facet in zip(measured, facets, strict=True)]
    caption = f"{experiment.paper}: {experiment.title}, ours with 95% intervals"
    return Table(experiment.name, caption, tuple(columns), rows, stacks=True).without_empty()


FACETS = ("Defense", "Model", "Data", "Patch", "Masks")
PROVENANCE = tuple(
    Column(key, title, page=False)
    for key, title in (
        ("device", "Device"),
        ("precision", "Labels"),
        ("seed", "Seed"),
        ("run", "Run"),
        ("command", "Command"),
    )
)


def _facets(line: Line) -> dict[str, str]:
    plan = line.plan
    return {
        "Defense": wording.defense_title(plan.defense),
        "Model": plan.model,
        "Data": DATA[plan.data].title,
        "Patch": wording.patch(plan.threat),
        "Masks": f"{plan.masks}×{plan.masks}" if plan.defense == MASKING else "none",
    }


def _row(line: Line, finding: Finding, facets: Mapping[str, str]) -> dict[str, Cell]:
    return {
        **{name.lower(): value for name, value in facets.items()},
        "variant": line.variant or None,
        **finding.values,
        **{f"paper_{key}": value for key, value in line.printed.items()},
        "images": finding.images,
        "why": why(line, finding),
        **{c.key: finding.origin.get(c.key) for c in PROVENANCE},
    }


def _short(measure: Column) -> str:
    return measure.title.removesuffix(", %")


def why(line: Line, finding: Finding) -> str:
    """One sentence on why our number is not the paper's."""
    plan, model = line.plan, model_of(line.plan.model)
    if plan.work == "time":
        hardware = finding.origin.get("versions", {}).get("hardware", "another machine")
        parts = [f"measured on {hardware}, the paper's on one RTX 2080 Ti at 224×224", *_busy(finding), model.why]
    elif plan.defense != MASKING and not line.printed:
        parts = ["the paper does not compare it", model.why, *_sample(line, finding)]
    elif not line.printed:
        parts = ["the paper draws this without printing a number", *_sample(line, finding), *_busy(finding)]
    else:
        source = plan.data in LOW and plan.grid == "source"
        grid = ["the patch lies on the 32×32 pixels themselves, the paper's on the enlarged input"] if source else []
        parts = [model.why, *grid, *_sample(line, finding), *_busy(finding)]
    text = "; ".join(parts)
    return f"{text[0].upper()}{text[1:]}."


def _busy(finding: Finding) -> list[str]:
    """By which clock times were taken; those of a machine that others use are too long, and say so."""
    if "milliseconds" not in finding.values:
        return []
    load = finding.origin.get("load")
    busy = f", while {load:g} processes wanted the machine's cores" if load else ""
    return [f"times are {finding.origin.get('clock', 'of the wall clock')}{busy}"]


def _sample(line: Line, finding: Finding) -> list[str]:
    whole, images = line.plan.images or DATA[line.plan.data].whole, finding.origin.get("of", finding.images)
    return [f"{images:,} images instead of {whole:,}"] if images < whole else []


def claim_lines(experiment: Experiment, found: Mapping[str, Finding]) -> list[str]:
    """For each of the paper's claims and each group that was measured: whether it holds, with the numbers."""
    measured = [(line, found[line.key]) for line in experiment.lines if line.key in found]
    lines: list[str] = []
    for claim in experiment.claims:
        for holds, who, numbers in told(claim, measured):
            lines.append(f"{claim.words}: {'yes' if holds else 'NO'} for {', '.join(who)} ({numbers}).")
    return lines


def experiment_figure(experiment: Experiment, found: Mapping[str, Finding]) -> Drawing | None:
    """The measures against the experiment's axis: a line for each model and measure."""
    axis = experiment.axis
    if axis is None:
        return None
    series = _series(experiment, axis, found)
    if not series:
        return None
    with style():
        figure, axes = blank(height=3.1)
        for number, ((group, measure), points) in enumerate(series.items()):
            colour, marker = LOOKS[axis.measures.index(measure) % len(LOOKS)]
            part = 1 - 0.5 * (number // len(axis.measures)) / max(1, len(series) // len(axis.measures))
            x, y = [at for at, _ in points], [value for _, value in points]
            label = f"{measure.replace('_', ' ')}, {group}"
            axes.plot(x, y, marker=marker, color=colour, alpha=part, label=label, markersize=4.5, clip_on=False)
        if axis.log:
            axes.set_xscale("log")
        elif all(at.is_integer() for points in series.values() for at, _ in points):
            axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.set_ylim(0, 100)
        axes.set_xlabel(axis.title)
        axes.set_ylabel("percent of the images")
        columns = 2 if len(series) > 2 else 1
        figure.legend(loc="outside upper left", ncols=columns)
        figure.set_figheight(3.1 + 0.19 * -(-len(series) // columns))
        caption = f"{experiment.paper} of the paper, on our data: {experiment.says}"
        title = f"{experiment.title} against {axis.title}"
        return Drawing(experiment.name, experiment.title, caption, title, figure)


def _series(
    experiment: Experiment, axis: Axis, found: Mapping[str, Finding]
) -> dict[tuple[str, str], list[tuple[float, float]]]:
    """Points from left to right by model and measure; a line needs two."""
    series: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for line in experiment.lines:
        finding = found.get(line.key)
        at = math.nan if finding is None else axis.at(line, finding)
        if finding is None or math.isnan(at):
            continue
        for measure in axis.measures:
            value = finding.values.get(measure)
            if value is not None and not math.isnan(percent(value)):
                group = f"{line.plan.model}, {DATA[line.plan.data].title}"
                series.setdefault((group, measure), []).append((at, percent(value)))
    return {key: sorted(points) for key, points in series.items() if len(points) > 1}
