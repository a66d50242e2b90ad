"""Which pages are made from the code, and by what."""

from collections.abc import Callable
from pathlib import Path

from fleetune.tools.docs.run_toml_reference import run_toml_reference
from fleetune.tools.file_map import file_map

PAGES: dict[str, Callable[[Path], str]] = {
    "docs/run-toml.md": lambda _: run_toml_reference(),
    "docs/map.md": file_map,
}
