"""Where tests find what lies in the repository."""

from pathlib import Path

ROOT = Path(__file__).parents[2]
OLD_STATES = ROOT / "tests" / "data"  # what earlier versions left; its README says how
