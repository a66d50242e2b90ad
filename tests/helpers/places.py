"""Paths of the repository's folders and files that tests need."""

from pathlib import Path

ROOT = Path(__file__).parents[2]
