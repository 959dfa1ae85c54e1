"""The page of the leaderboard, in Markdown: figures, then a table for each promise and pixel grid."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from patchcleanser.core.counts import counted
from patchcleanser.reports.claims import OURS, DefenseClaim
from patchcleanser.reports.cost_figure import figure, groups
from patchcleanser.reports.tables import markdown_text

PROMISES = {
    "recovery": ("Recovery", "The attacker cannot change the answer of a certified image."),
    "detection": (
        "Detection",
        "The weaker promise: the attacker cannot change the answer without an alert, but can force an alert.",
    ),
}
GRIDS = {
    "source": "Patch on the image (source grid)",
    "input": "Patch on the network's input (input grid)",
    None: "Pixel grid not stated",
}
"""Sizes on different grids are different threats, so each has a table of its own."""
COLUMNS = (
    "Method",
    "Data",
    "Patch",
    "Threat",
    "Masks",
    "Certified, %",
    "Clean, %",
    "Images",
    "Cost",
    "Evidence",
    "Proof",
    "Attack",
)
NUMBERS = {"Certified, %", "Clean, %", "Images"}

HEAD = """\
---
hide: [toc]
---

# Leaderboard

<!-- Written by `make leaderboard` from leaderboard/claims. Do not edit. -->

What defenses against adversarial patches are claimed to certify, and what each claim rests on. {counts}

| evidence | what it means |
|---|---|
| re-derived | The rows are in the repository. `make leaderboard` derives every number from them. `run` is their hash. |
| audited | Some of these rows were also computed again from model and images. `audit` is the outcome's signature. |
| measured | We measured it, but the rows are not in the repository. The number stands in the file that is named. |
| reported | A paper prints it. Nothing was checked here. |

*Proof* names the theorem that [Coq has checked](../internals/proofs.md) of the certificate. *Statistical* certificates
rest on labels of lower precision ([why](../internals/fast-labels.md)). *Attack* says what was tried, and on how many
images. Shares are percentages. Cost is for one image, answer and certificate together. Times on different machines do
not compare.

A patch on the image and one on the resized input are [different threats](../internals/pixel-grids.md). The paper's 5×5
of 32×32 px are 35×35 px of an enlarged input. Recovery and detection are different promises. None of these ever share a
column here.

Add your defense in one pull request: `leaderboard/README.md` in the repository says how. Certified objects and several
labels stand elsewhere: [detectors](detectors.md), [several labels](../guide/multilabel.md).
"""
FIGURES = 2
"""How many figures are open; the rest unfolds."""

TAIL = """\
## Published, but not in the tables

- CrossCert (2024) and CostCert (2025): other guarantees (two defenses cross-checked, top-k).
- CertMask (2026): one round of masks, without code. One round of small masks
  [certifies no label](../internals/proofs.md#how-few-labels-could-do).
- PatchDEMUX (2025): classifiers of several labels, about 50% certified recall at 50% precision on COCO.
"""


def page(claims: Sequence[DefenseClaim]) -> str:
    """The whole page; the same claims give the same text."""
    numbers = Counter(claim.standing for claim in claims)
    counts = f"{len(claims)} claims: " + ", ".join(f"{numbers[name]} {name}" for name in sorted(numbers)) + "."
    parts = [HEAD.format(counts=counts), *_figures(claims)]
    parts.append('<div class="claim-filters" hidden></div>\n')
    for promise, (title, meaning) in PROMISES.items():
        parts.append(f"## {title}\n\n{meaning}\n")
        for grid, name in GRIDS.items():
            rows = [claim for claim in claims if (claim.promise, claim.grid) == (promise, grid)]
            if rows:
                parts.append(f"### {title}: {name[0].lower()}{name[1:]}\n\n{table(rows)}")
    return "\n".join([*parts, _papers(claims), TAIL])


def _papers(claims: Sequence[DefenseClaim]) -> str:
    """Each paper with its code, once."""
    papers = sorted({(claim.authors or "", claim.paper, claim.code or "") for claim in claims if claim.paper})
    lines = (
        f"- {markdown_text(authors)}: {markdown_text(str(title))}." + (f" [Code]({code})." if code else "")
        for authors, title, code in papers
    )
    return "## Papers\n\n" + "\n".join(lines) + "\n"


def _figures(claims: Sequence[DefenseClaim]) -> list[str]:
    drawn = groups(claims)
    if not drawn:
        return []
    legend = "Dots are re-derived, rings measured, dashed rings reported. Numbers: the most certified for their cost."
    ordered = sorted(drawn.items(), key=lambda item: (-len(item[1]), item[0].title))
    figures = [figure(group, points) for group, points in ordered]
    text = ["## Certified against cost\n", f"{legend} Each figure has one threat on one grid.\n"]
    text += ['<div class="cost">', *figures[:FIGURES], "</div>\n"]
    if more := figures[FIGURES:]:
        summary = f"<summary>{counted(len(more), 'more figure')}</summary>"
        text += [f'<details>{summary}<div class="cost">', *more, "</div></details>\n"]
    return ["\n".join(text)]


def table(claims: Sequence[DefenseClaim]) -> str:
    """One table of claims of one promise and grid, the most certified of each threat first."""
    ordered = sorted(claims, key=_order)
    rules = ["---:" if name in NUMBERS else "---" for name in COLUMNS]
    lines = [COLUMNS, rules, *map(_cells, ordered)]
    grid = claims[0].grid or "not stated"
    body = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    return f'<div class="claims" data-grid="{grid}" markdown>\n\n{body}\n\n</div>\n'


def _order(claim: DefenseClaim) -> tuple[Any, ...]:
    threat = (claim.count, claim.side is None, claim.at or 0, claim.side or 0, claim.size_of_patch)
    return (claim.data, *threat, -claim.certified, claim.file_name)


def _cells(claim: DefenseClaim) -> list[str]:
    method = f"{claim.method} ({claim.options})" if claim.options else claim.method
    texts = [method, claim.data, claim.size_of_patch, claim.kind_of_threat, (claim.masks or "–").replace("x", "×")]
    numbers = [_number(claim.certified), _number(claim.clean), _number(claim.images)]
    return [*map(markdown_text, [*texts, *numbers, _cost(claim)]), _evidence(claim), _proof(claim), _attack(claim)]


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:,}" if isinstance(value, int) else f"{value:.1f}"


def _cost(claim: DefenseClaim) -> str:
    labels = "" if claim.classifications is None else counted(round(claim.classifications), "classification")
    digits = 0 if (claim.milliseconds or 0) >= 100 else 1
    time = "" if claim.milliseconds is None else f"{claim.milliseconds:,.{digits}f} ms ({claim.hardware})"
    return "; ".join(filter(None, (labels, time))) or "–"


def _evidence(claim: DefenseClaim) -> str:
    """What the numbers rest on, in the words of the page's first table."""
    if claim.standing == "re-derived":
        audit = (
            f"; audited, audit `{claim.audit_key[:12]}`: {counted(claim.rederived or 0, 'row')}"
            if claim.audit_key
            else ""
        )
        by = "" if claim.measured_by == OURS else f"; by {markdown_text(claim.measured_by)}"
        text = f"re-derived, run `{str(claim.run_digest)[:12]}`{audit}{by}"
    elif claim.standing == "measured":
        text = f"measured: `{str(claim.table).partition('#')[0]}`"
    else:
        text = f"reported: {markdown_text(claim.citation)}"
    return text + (f". {markdown_text(claim.note)}" if claim.note else "")


def _proof(claim: DefenseClaim) -> str:
    """The theorem that was checked, and whether labels are certain."""
    proof = f"Coq: *{claim.theorem.replace('_', ' ')}*" if claim.theorem else ""
    return "; ".join(filter(None, (proof, "statistical" if claim.labels == "fast" else ""))) or "–"


def _attack(claim: DefenseClaim) -> str:
    """The attack that was run, and how many certified images it fooled."""
    attack = claim.attack or "–"
    if claim.attacked is not None:
        attack += f": {counted(claim.attacked, 'image')}, {claim.fooled} certified ones fooled"
    return markdown_text(attack)
