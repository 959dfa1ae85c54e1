"""Records in; tables, figures and pages out. No model and no torch needed."""
