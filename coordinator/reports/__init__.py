"""Shows a run: live view, summary, tables, plots and pages. Nothing here changes a run."""
