"""What a run shows and leaves: live view, summary, tables, plots and pages. Read-only."""
