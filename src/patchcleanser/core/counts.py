"""Counts with their nouns, for messages."""


def counted(number: int, noun: str) -> str:
    """A number and its noun.

    >>> counted(1, "image"), counted(0, "class"), counted(1200, "patch")
    ('1 image', '0 classes', '1,200 patches')
    """
    ending = "" if number == 1 else "es" if noun.endswith(("s", "ch")) else "s"
    return f"{number:,} {noun}{ending}"
