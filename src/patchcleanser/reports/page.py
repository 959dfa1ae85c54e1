"""The page: a template, filled in. Ids, class names and paths are other people's text and are escaped."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from patchcleanser.records.metrics import Proportion
from patchcleanser.reports import results, wording
from patchcleanser.reports.contents import Report
from patchcleanser.reports.drawing import Drawing, inline
from patchcleanser.reports.published import comparable
from patchcleanser.reports.studies import Study
from patchcleanser.reports.tables import interval_of, text_of

HERE = Path(__file__).parent


def page(report: Report) -> str:
    """The whole page as text."""
    jinja = Environment(
        loader=FileSystemLoader(HERE), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    jinja.filters.update(number=text_of, interval=interval_of, svg=_svg, breakable=_breakable)
    template = jinja.get_template("page.html.jinja")
    css = Markup((HERE / "page.css").read_text(encoding="utf-8"))
    return template.render(report=report, css=css, words=wording, results=results, **_headline(report))


def _svg(drawing: Drawing) -> Markup:
    return Markup(inline(drawing))  # matplotlib escapes the text in its figures


def _breakable(text: str) -> Markup:
    """Text that may go on in the next line behind a slash or a colon."""
    return Markup("<wbr>").join(re.split(r"(?<=[/:])", text))


def _headline(report: Report) -> dict[str, Any]:
    studies, lead = list(report.names), report.leading[0]
    return {
        "lead": lead,
        "single": len(report.leading) == 1,
        "headline": report.title or headline(report),
        "said": headline(report) if report.title else None,
        "unfinished": [study for study in studies if study.missing],
        "broken": [study for study in studies if study.fooled],
        "skipped": sum(study.summary.skipped for study in studies),
        "enlarged": enlarged(studies),
        "manifest": manifest,
        "bars": attack_bars(lead) if lead.attacked else bars(lead),
    }


def headline(report: Report) -> str:
    """The result in one sentence."""
    studies = report.recovery or report.detection
    if not studies:
        return attack_headline(report.attacks)
    shares = [study.summary.shares[study.promise] for study in studies]
    promise = "certified" if report.recovery else "certified for detection"
    attacks = {wording.attack(study) for study in studies}
    against = f" against {wording.attack(studies[0])}" if len(attacks) == 1 else ""
    said = [f"{share.percent:.1f}" for share in shares]
    if len(studies) == 1:
        return f"{said[0]}% {promise}{against}"
    others = f" ({len(report.detection)} more only detect)" if report.recovery and report.detection else ""
    if len(set(said)) == 1:
        return f"{said[0]}% {promise}{against}, in {'both' if len(said) == 2 else f'all {len(said)}'} runs{others}"
    differs = [name.lower() for name in wording.deciding(studies, said)]
    why = f"depending on {' and '.join(differs)}" if 0 < len(differs) < 3 else f"in {len(studies)} runs{others}"
    low, high = min(said, key=float), max(said, key=float)
    return f"{low}% to {high}% {promise}{against}, {why}"


def attack_headline(attacks: list[Study]) -> str:
    """What attacks alone show, in one sentence; a broken certificate is said before anything else."""
    broken = sum(study.fooled for study in attacks)
    if broken:
        return f"{broken:,} certified {'image was' if broken == 1 else 'images were'} fooled"
    studies = [study for study in attacks if not study.detects] or attacks
    said = sorted({f"{study.summary.shares[study.held].percent:.1f}" for study in studies}, key=float)
    held = "never wrong silently under attack" if studies[0].detects else "still right under attack"
    share = f"{said[0]}%" if len(said) == 1 else f"{said[0]}% to {said[-1]}%"
    return f"{share} {held}, no certified image fooled"


def attack_bars(study: Study) -> list[tuple[str, str, Proportion]]:
    """What an attack's headline compares."""
    shares = study.summary.shares
    held = "Defended, never wrong silently" if study.detects else "Defended, attacked"
    return [
        *bars(study)[:2],
        ("undefended", "Undefended, attacked", shares["undefended_under_attack"]),
        ("clean", held, shares[study.held]),
        bars(study)[2],
    ]


def bars(study: Study) -> list[tuple[str, str, Proportion]]:
    """What the headline compares: a class for the style, words, and the share."""
    shares = study.summary.shares
    last = ("certified", "Certified") if not study.detects else ("detection_certified", "Certified for detection")
    return [
        ("undefended", "Undefended", shares["undefended"]),
        ("clean", "Defended, clean images", shares["clean"]),
        ("promise", last[1], shares[last[0]]),
    ]


def enlarged(studies: list[Study]) -> str | None:
    """What must be said where published numbers mean other pixels than these runs."""
    theirs = [row for study in studies for row in comparable(study) if row.grid == "input"]
    if not theirs:
        return None
    if any(row.at == 32 for row in theirs):
        said = (
            "The PatchCleanser paper enlarges 32×32 images to 224×224 and certifies a patch on the enlarged input: its "
            "“5×5” is 35×35 px there, its “2×2” is 14×14."
        )
    else:
        said = "The PatchCleanser paper certifies a patch on the resized and cropped 224×224 input of the network."
    if any(study.run.threat.grid == "source" for study in studies):
        said += (
            " Runs here certify a patch on the image as it came, which is the stronger statement: enlarging spreads "
            "a patch over more pixels than the paper's masks are made for."
        )
    return said


def manifest(study: Study) -> str:
    """Everything that decided the rows, and the circumstances; paths are shortened, the run folder has them whole."""
    metadata = {key: value for key, value in study.run.metadata.items() if key not in ("classes", "model_classes")}
    run = study.run
    content = {"key": run.key, "digest": run.digest, "images": run.images, "batch": run.batch, "about": metadata}
    return wording.brief(json.dumps({**content, "job": run.job}, indent=1, ensure_ascii=False))
