"""Several methods, several seeds, the same fleet and data: runs, tables, plots and a page."""
