"""Write a report: the page is a template, filled in. Ids, class names and paths come from others and are escaped."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from patchcleanser.core.counts import counted
from patchcleanser.records.atomic import whole_file
from patchcleanser.records.derive import Derived
from patchcleanser.records.leftovers import require_only
from patchcleanser.records.metrics import Proportion
from patchcleanser.records.run import Run
from patchcleanser.reports import page_words, run_tables, wording
from patchcleanser.reports.comparison import MEASURES, Comparison
from patchcleanser.reports.contents import ReportContents, gather
from patchcleanser.reports.drawing import inline, save
from patchcleanser.reports.next_steps import go_on, next_steps
from patchcleanser.reports.published import comparable
from patchcleanser.reports.run_results import RunResult, audit_outcome
from patchcleanser.reports.tables import interval_of, text_of, write_tables

HERE = Path(__file__).parent


def write_report(
    runs: Sequence[tuple[Run, Derived | None]], out: Path, *, title: str | None = None, pictures: bool = True
) -> Path:
    """Write report.html (one file that loads nothing else), tables/ and figures/; return the path of the page.

    Deletes tables and figures that an earlier report wrote there and this one does not.
    """
    report = gather(runs, title=title, pictures=pictures)
    files = write_tables(report.all_tables(), out / "tables")
    for drawing in report.all_figures():
        files += save(drawing, out / "figures")
    target = out / "report.html"
    with whole_file(target) as part:
        part.write_text(page(report), encoding="utf-8", errors="replace")
    _delete_old({path.relative_to(out).as_posix() for path in files}, out)
    return target


SIGNED = "· patchcleanser</title>"
"""Ends the title of each page of ours, and so stands near its beginning."""
PARTS = {"tables", "figures", "report-files.json"}
"""What a report that was stopped before its page was written leaves."""


def require_report_folder(out: Path) -> None:
    """RecordError if a folder holds other files than a report of ours, which may be written again."""
    page = out / "report.html"
    if not page.is_file() or SIGNED not in page.read_text(encoding="utf-8", errors="replace")[:2000]:
        require_only(out, PARTS, "holds no report of ours")


def _delete_old(written: set[str], out: Path) -> None:
    list_path = out / "report-files.json"
    with suppress(OSError, ValueError, TypeError):  # no earlier report, or an unreadable list
        for name in {*json.loads(list_path.read_text(encoding="utf-8"))} - written:
            if Path(name).parent.as_posix() in ("tables", "figures"):
                (out / name).unlink(missing_ok=True)
    with whole_file(list_path) as part:
        part.write_text(json.dumps(sorted(written), indent=1) + "\n", encoding="utf-8")


def template_environment(*folders: Path) -> Environment:
    """Templates of these folders and of this package, with filters for cells and drawings; text is escaped."""
    loader = FileSystemLoader([*folders, HERE])
    jinja = Environment(loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    # Matplotlib escapes the text in its figures. Long ids may break after a slash or a colon.
    jinja.filters.update(
        counted=counted,
        number=text_of,
        interval=interval_of,
        svg=lambda drawing: Markup(inline(drawing)),
        breakable=lambda text: Markup("<wbr>").join(re.split(r"(?<=[/:])", text)),
    )
    jinja.globals["css"] = Markup((HERE / "page.css").read_text(encoding="utf-8"))
    return jinja


def page(report: ReportContents) -> str:
    """The page as HTML."""
    template = template_environment().get_template("page.html.jinja")
    script = (HERE / "page.js").read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return template.render(
        report=report,
        wording=wording,
        run_tables=run_tables,
        page_words=page_words,
        go_on=go_on,
        script=Markup(script),
        script_hash=f"sha256-{digest}",
        **_facts(report),
    )


def _facts(report: ReportContents) -> dict[str, Any]:
    """What the template needs besides the contents."""
    results, lead, state = list(report.names), report.leading[0], unfinished_prefix(report)
    audits = {result: outcome for result in results if (outcome := audit_outcome(result.run))}
    return {
        "audits": audits,
        "contradicted": [result for result in audits if audits[result].contradictions],
        "lead": lead,
        "single": len(report.leading) == 1,
        "show_results": shows_results(report),
        "next_steps": next_steps(
            report.leading, [result for result in audits if audits[result].counts], attacked=bool(report.attacks)
        ),
        "headline": state + (report.title or headline(report)),
        "result_line": headline(report) if report.title else None,
        "unfinished": [result for result in results if result.missing],
        "broken": [result for result in results if result.fooled],
        "skipped": sum(result.summary.skipped for result in results),
        "published_grids": published_grids(results),
        "manifest": manifest,
        "bars": bars(lead),
    }


def shows_results(report: ReportContents) -> bool:
    """Whether the table of results says more than the bars of a single run."""
    if len(report.leading) != 1:
        return bool(report.sections)
    keys = {column.key for column in report.tables["runs"].shown().columns} if "runs" in report.tables else set()
    return bool(report.detection) or "row_certified" in keys


def unfinished_prefix(report: ReportContents) -> str:
    """What precedes the headline where images are missing, such as "Unfinished (16 of 24 images): "."""
    behind = sum(result.missing > 0 for result in report.names)
    if not behind:
        return ""
    done = sum(result.summary.images + result.summary.skipped for result in report.names)
    images = f"{done:,} of {sum(result.run.images for result in report.names):,} images"
    runs = "" if len(report.names) == 1 else f"{behind:,} of {len(report.names):,} runs, "
    return f"Unfinished ({runs}{images}): "


def headline(report: ReportContents) -> str:
    """The main result in one sentence."""
    results = report.recovery or report.detection
    if not results:
        return attack_headline(report)
    certified = "of the images certified" + ("" if report.recovery else " for detection")
    threats = {wording.any_patch(result) for result in results}
    against = f" against {threats.pop()}" if len(threats) == 1 else ""
    shares, images = headline_shares(report, results, results[0].certified_key)
    percents = [f"{share.percent:.1f}" for share in shares]
    if len(results) == 1:
        return f"{percents[0]}% {certified}{against}"
    more = f" ({len(report.detection)} more only detect)" if report.recovery and report.detection else ""
    if len(set(percents)) == 1:
        runs = "both" if len(results) == 2 else f"all {len(results)}"
        return f"{percents[0]}% {certified}{against}, in {runs} runs{more}{images}"
    differs = [f"the {name.lower()}" for name in wording.deciding(results, percents)]
    why = f"depending on {' and '.join(differs)}" if 0 < len(differs) < 3 else f"in {len(results)} runs{more}"
    low, high = min(percents, key=float), max(percents, key=float)
    return f"{low}% to {high}% {certified}{against}, {why}{images}{significance(report, results[0].certified_key)}"


def significance(report: ReportContents, key: str) -> str:
    """The end of a headline on two runs that were compared: whether their difference in this share may be chance."""
    both = report.comparison
    if not isinstance(both, Comparison) or key not in both.shares:
        return ""
    p_value = next(row["p_value"] for row in both.measures.rows if row["measure"] == MEASURES[key])
    verdict = "is significant" if float(str(p_value)) < SIGNIFICANT else "may be chance"
    return f"; the difference {verdict} (p = {p_value})"


SIGNIFICANT = 0.05
"""A difference of two runs is called significant below this p."""


def headline_shares(report: ReportContents, results: list[RunResult], key: str) -> tuple[list[Proportion], str]:
    """This share of each run, and a word on the images where they differ: two runs count on their common ones only."""
    images = {result.summary.images for result in results}
    both = report.comparison
    if len(results) == 2 and isinstance(both, Comparison) and images != {both.images}:
        return [*both.shares[key]], f", on {counted(both.images, 'common image')}"
    words = "" if len(images) == 1 else f", on {min(images):,} to {max(images):,} images each"
    return [result.summary.shares[key] for result in results], words


def attack_headline(report: ReportContents) -> str:
    """The main result of attacks alone, in one sentence; a broken certificate comes before anything else."""
    broken = sum(result.fooled for result in report.attacks)
    if broken:
        return f"{broken:,} certified {'image was' if broken == 1 else 'images were'} fooled"
    results = [result for result in report.attacks if not result.detects] or report.attacks
    shares, images = headline_shares(report, results, results[0].robust_key)
    percents = sorted({f"{share.percent:.1f}" for share in shares}, key=float)
    robust = "never wrong silently under attack" if results[0].detects else "still correct under attack"
    share = f"{percents[0]}%" if len(percents) == 1 else f"{percents[0]}% to {percents[-1]}%"
    return f"{share} {robust}, no certified image fooled{images}"


def bars(result: RunResult) -> list[tuple[str, str, Proportion]]:
    """The shares below the headline: a CSS class, a label, and the share."""
    shares = result.summary.shares
    robust = "Defended, never wrong silently" if result.detects else "Defended, attacked"
    attacked = [
        ("undefended", "Undefended, attacked", "undefended_under_attack"),
        ("clean", robust, result.robust_key),
    ]
    certified = "Certified for detection" if result.detects else "Certified"
    rows = [
        ("undefended", "Undefended", "undefended"),
        ("clean", "Defended, clean images", "clean"),
        *(attacked if result.attacked else []),
        ("guarantee", certified, result.certified_key),
    ]
    return [(css, label, shares[key]) for css, label, key in rows]


def published_grids(results: list[RunResult]) -> dict[str, bool]:
    """Which pixels the patches of published numbers and of these runs refer to."""
    published = [row for result in results for row in comparable(result) if row.grid == "input"]
    return {
        "on_input": bool(published),
        "small_images": any(row.at == 32 for row in published),
        "ours_on_source": any(result.run.threat.grid == "source" for result in results),
    }


def manifest(result: RunResult) -> str:
    """The job and metadata of a run as JSON, with shortened paths; the run folder has them in full."""
    metadata = {key: value for key, value in result.run.metadata.items() if key not in ("classes", "model_classes")}
    run = result.run
    content = {"key": run.key, "digest": run.digest, "images": run.images, "batch": run.batch, "about": metadata}
    return wording.shorten_paths(json.dumps({**content, "job": run.job}, indent=1, ensure_ascii=False))
