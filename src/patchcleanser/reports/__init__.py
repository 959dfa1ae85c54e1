"""Rows of runs in; a page, tables and figures out. Needs no model and no torch."""

from patchcleanser.reports.multilabel_report import write_multilabel_report
from patchcleanser.reports.object_report import write_object_report
from patchcleanser.reports.page import write_report

__all__ = ["write_multilabel_report", "write_object_report", "write_report"]
