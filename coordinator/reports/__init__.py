"""Views of a run and its final files: live view, summary, tables, plots and pages. Nothing here changes a
run.
"""
