"""The leaderboard: every claim is checked against the rows it names, and the page is written from the claims.

python -m patchcleanser.reports.leaderboard            check, and write the page
python -m patchcleanser.reports.leaderboard --check    check only, that the page is up to date, too
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from patchcleanser.core.counts import counted
from patchcleanser.errors import RecordError
from patchcleanser.records.atomic import whole_file
from patchcleanser.reports.claims import DefenseClaim
from patchcleanser.reports.leaderboard_page import page
from patchcleanser.reports.rederive import problems_of

CLAIMS = Path("leaderboard", "claims")
PAGE = Path("docs", "results", "leaderboard.md")
PUBLISHED = Path("src", "patchcleanser", "reports", "published.json")
"""Claims of papers, for the reports of an installed package."""


def read_claims(root: Path) -> tuple[dict[str, DefenseClaim], list[str]]:
    """The claims below the root of the repository by their path, and what is wrong with files that hold none."""
    claims, problems = {}, []
    paths = sorted((root / CLAIMS).glob("*.json"))
    if not paths:
        raise RecordError(f"no claims in {root / CLAIMS}; call it in the root of the repository")
    for path in paths:
        try:
            claims[(CLAIMS / path.name).as_posix()] = DefenseClaim.read(path)
        except RecordError as error:
            problems.append(f"{CLAIMS.as_posix()}/{error}")
    return claims, problems


def check(root: Path) -> tuple[list[DefenseClaim], list[str]]:
    """All sound claims, and every problem: schema, digests, and numbers that do not follow from the rows."""
    claims, problems = read_claims(root)
    for path, claim in claims.items():
        problems += [f"{path}: {problem}" for problem in problems_of(claim, root)]
    return list(claims.values()), problems


def generated(claims: Sequence[DefenseClaim]) -> dict[Path, str]:
    """The files that follow from the claims."""
    reported = [claim.to_dict() for claim in claims if claim.standing == "reported"]
    lines = ",\n".join(json.dumps(claim, ensure_ascii=False) for claim in reported)
    return {PAGE: page(claims), PUBLISHED: f"[\n{lines}\n]\n"}


def main(arguments: Sequence[str] | None = None) -> int:
    """Check the leaderboard of the repository that is the current folder; the exit status."""
    parser = argparse.ArgumentParser(description="Check every claim of the leaderboard, and write its page.")
    parser.add_argument("--check", action="store_true", help="write nothing, and fail if the page is out of date")
    writes, root = not parser.parse_args(arguments).check, Path()
    claims, problems = check(root)
    for path, text in {} if problems else generated(claims).items():
        if writes:
            with whole_file(root / path) as part:
                part.write_text(text, encoding="utf-8")
        elif not (root / path).is_file() or (root / path).read_text(encoding="utf-8") != text:
            problems.append(f"{path} is out of date; run: make leaderboard")
    for problem in problems:
        print(problem, file=sys.stderr)
    rows = sum(claim.standing == "re-derived" for claim in claims)
    total, wrong = counted(len(claims), "claim"), counted(len(problems), "problem")
    print(f"{total}, {rows} of them derived again from their rows; {wrong}")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
