"""Rows of runs in; a page, tables and figures out. Needs no model and no torch."""

from patchcleanser.reports.page import write_report

__all__ = ["write_report"]
