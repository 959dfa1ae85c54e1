"""Entry: what a defense or an attack is called, and where its class is, without importing torch."""

from __future__ import annotations

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

    def load(self) -> Any:
        """Import the class."""
        module, _, name = self.home.partition(":")
        return getattr(import_module(module), name)


def load_name(entries: dict[str, Entry], module: str, name: str) -> Any:
    """Load a class of a package by its class name, for the package's `__getattr__`."""
    for entry in entries.values():
        if entry.home.endswith(f":{name}"):
            return entry.load()
    raise AttributeError(f"module {module!r} has no attribute {name!r}")
