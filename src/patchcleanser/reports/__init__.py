"""Records in; tables, figures and pages out. No model and no torch needed."""

from patchcleanser.reports.report import write_report

__all__ = ["write_report"]
