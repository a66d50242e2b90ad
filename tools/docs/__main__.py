"""`python -m fleetune.tools.docs [FOLDER]`: write the pages that are generated from code and result files."""

import sys
from pathlib import Path

from fleetune.tools.docs.pages import PAGES
from fleetune.tools.docs.result_tables import page_with_tables, pages_with_tables

if __name__ == "__main__":
    root = Path(sys.argv[1] if len(sys.argv) > 1 else ".")
    for name, page in PAGES.items():
        (root / name).write_text(page(root), encoding="utf-8")
    for name in pages_with_tables(root):
        (root / name).write_text(page_with_tables(root, name), encoding="utf-8")
