"""Griffe extension of the docs site: examples in docstrings (`>>> …`) are shown as code."""

from __future__ import annotations

import re
from typing import Any

import griffe

EXAMPLE = re.compile(r"(?:^[ ]*(?:>>>|\.\.\.).*\n?(?:^(?![ ]*>>>)[ ]*\S.*\n?)*)+", flags=re.MULTILINE)


class FencedExamples(griffe.Extension):
    """Puts a code fence around each run of examples and their output."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring and ">>>" in obj.docstring.value:
            obj.docstring.value = EXAMPLE.sub(
                lambda match: f"```pycon\n{match[0].rstrip()}\n```\n", obj.docstring.value
            )
