"""What devices serve in runs with [adoption], and what that gained them: for summary, tables and page."""
