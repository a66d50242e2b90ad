"""Compares several methods with several seeds on the same fleet and data: runs, tables, plots and a page."""
