"""Names say what they hold, and each name means one thing."""

from __future__ import annotations

import ast
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

SRC = Path(__file__).parent.parent / "src" / "patchcleanser"
TREES = {path: ast.parse(path.read_text(encoding="utf-8")) for path in sorted(SRC.rglob("*.py"))}

VAGUE = {"found", "told", "said", "asked", "kept", "mine", "made", "known", "seen", "sure", "one", "others", "whole"}
"""Words that do not say what a value holds."""


def bound_names(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.arg):
            yield node.arg


def test_values_are_named_by_what_they_hold() -> None:
    counts = Counter(name for tree in TREES.values() for name in bound_names(tree) if name in VAGUE)
    assert counts == Counter()


def test_no_two_classes_share_a_name() -> None:
    homes = defaultdict(list)
    for path, tree in TREES.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                homes[node.name].append(path.name)
    shared = {name: paths for name, paths in homes.items() if len(paths) > 1}
    assert shared == {"DetectionCertificate": ["results.py", "schemas.py"]}  # the HTTP document names it, too


def test_no_two_modules_share_a_name() -> None:
    homes = defaultdict(list)
    for path in TREES:
        if path.stem != "__init__" and path.parent.name != "cli":
            homes[path.stem].append(path.parent.name)
    assert {name: packages for name, packages in homes.items() if len(packages) > 1} == {}
