"""Words that a reader of the page may not know: explained at its end, and linked where each first occurs."""

from __future__ import annotations

import re

from markupsafe import Markup

WORDS = {
    "row-certified": "For each place of the patch, some mask that hides it keeps the correct label, alone and together "
    "with each other mask. It asks for less than certified, and proves the same.",
    "double-masking": "The image is classified under each mask, and under pairs of masks where these labels differ.",
    "challenger masking": "Double-masking's certificate for cheaper answers: masks of different labels meet two at a "
    "time.",
    "Minority Reports": "A defense that only detects: the undefended label, or an alert if some mask changes it with "
    "confidence.",
    "Auto-PGD": "An attack on the undefended classifier: gradient descent that adapts its own step size.",
    "classification": "One run of the network on one image, masked or not: the unit of every cost.",
    "run digest": "A hash of all rows of a run: a number published with it is tied to these rows.",
}
CLOSED = {"a", "button", "code", "h1", "h2", "h3", "nav", "pre", "script", "summary", "svg"}
"""Elements without links to words."""
TAG = re.compile(r"(<[^>]*>)")


def linked(content: Markup) -> Markup:
    """The content with a link to its explanation where a word first occurs in running text."""
    left, inside, parts = dict(WORDS), list[str](), TAG.split(content)
    for at, part in enumerate(parts):
        tag = re.match(r"<(/?)(\w+)", part)
        if tag is not None:
            if tag[2] in CLOSED:
                inside = inside[:-1] if tag[1] else [*inside, tag[2]]
        elif not inside:
            for word in [word for word in left if re.search(_pattern(word), part)]:
                part = re.sub(_pattern(word), rf'<a href="#{_id(word)}">\g<0></a>', part, count=1)
                del left[word]
            parts[at] = part
    return Markup("".join(parts))


def occurring(content: Markup) -> list[tuple[str, str, str]]:
    """The words that are in the linked content: the id, the word and its explanation."""
    return [(_id(word), word, text) for word, text in WORDS.items() if f'href="#{_id(word)}"' in content]


def _pattern(word: str) -> str:
    return rf"(?i)\b{re.escape(word)}s?\b"


def _id(word: str) -> str:
    return f"word-{word.lower().replace(' ', '-')}"
