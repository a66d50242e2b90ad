"""Cells of the papers' tables as TOML files, and our runs of them."""
