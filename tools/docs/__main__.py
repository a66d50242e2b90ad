"""`python -m fleetune.tools.docs [FOLDER]`: write the pages that are made from the code, for `make docs`."""

import sys
from pathlib import Path

from fleetune.tools.docs.pages import PAGES

if __name__ == "__main__":
    root = Path(sys.argv[1] if len(sys.argv) > 1 else ".")
    for name, page in PAGES.items():
        (root / name).write_text(page(root), encoding="utf-8")
