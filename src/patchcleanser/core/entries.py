"""Entry: what a defense or an attack is called, and where its class is, without importing torch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from importlib import import_module
from typing import Any


@dataclass(frozen=True)
class Entry:
    """A class that users choose by name. Reports read titles from it without loading the class."""

    home: str
    """module:Class"""
    title: str
    summary: str
    """How it works, in one sentence for reports."""
    reference: str | None = None
    """The slow, independent algorithm in evaluation/reference.py that an audit compares this defense with."""
    theorem: str | None = None
    """The theorem that Coq has checked of its certificate."""

    def load(self) -> Any:
        """Import the class."""
        return import_home(self.home)


def load_name(package: str, homes: Iterable[str], name: str) -> Any:
    """Import a class of a package by its name, for the package's `__getattr__`; homes are module:Class."""
    for home in homes:
        if home.endswith(f":{name}"):
            return import_home(home)
    raise AttributeError(f"module {package!r} has no attribute {name!r}")


def import_home(home: str) -> Any:
    """What `module:Class` names."""
    module, _, name = home.partition(":")
    return getattr(import_module(module), name)
