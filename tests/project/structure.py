"""Large classes and files that import much: `make check` lists them with the reason that each has.

A class's attributes are its annotated fields and the names that its methods assign to `self`.
Sections of settings and options of commands are exempt: their fields are what users write.
"""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDERS = ("protocols", "coordinator", "edge_agent", "firmware_profiles", "tools", "benchmarks")
MAX_ATTRIBUTES = 15
MAX_IMPORTS = 20

LARGE_CLASSES = {
    "coordinator/queries/run_status.py:RunStatus": "one JSON object of `edge-coordinator status --json`",
    "coordinator/queries/run_status.py:DeviceStatus": "one JSON object of `edge-coordinator devices --json`",
    "coordinator/metrics/summary.py:Summary": "the top level of summary.json",
    "coordinator/metrics/summary.py:DeviceSummary": "one device in summary.json",
    "protocols/wire/payloads.py:Enrolment": "one payload on the wire",
    "protocols/method/choice.py:DeviceReport": "one part of a message on the wire",
    "edge_agent/extensions/adoption/deployed_model.py:ModelRecord": "one stored record",
    "firmware_profiles/__init__.py:Board": "the figures of one board's file",
}
"""`path:class` and the reason why it has more attributes. Classes that are missing here are to be divided."""


def files() -> Iterator[Path]:
    """Every Python file of the product and the benchmarks."""
    for folder in FOLDERS:
        yield from sorted((ROOT / folder).rglob("*.py"))


def attributes(node: ast.ClassDef) -> set[str]:
    """The names of a class's attributes, without leading underscores."""
    fields = {
        item.target.id
        for item in node.body
        if isinstance(item, ast.AnnAssign)
        and isinstance(item.target, ast.Name)
        and "ClassVar" not in ast.unparse(item.annotation)
    }
    assigned = {
        inner.attr
        for inner in ast.walk(node)
        if isinstance(inner, ast.Attribute) and isinstance(inner.ctx, ast.Store)
        if isinstance(inner.value, ast.Name) and inner.value.id == "self"
    }
    return {name.lstrip("_") for name in fields | assigned}


def is_exempt(path: Path, node: ast.ClassDef) -> bool:
    """True for sections of settings and for options of commands."""
    bases = " ".join(ast.unparse(one) for one in node.bases)
    return (
        "settings" in path.parts
        or "Settings" in bases
        or node.name.endswith(("Section", "Settings", "Options"))
    )


def large_classes() -> dict[str, int]:
    """`path:class` with its number of attributes, of classes above MAX_ATTRIBUTES."""
    found = {}
    for path in files():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef) and not is_exempt(path.relative_to(ROOT), node):
                number = len(attributes(node))
                if number > MAX_ATTRIBUTES:
                    found[f"{path.relative_to(ROOT)}:{node.name}"] = number
    return found


def large_importers() -> dict[str, int]:
    """Path with its number of imported modules of ours, of files above MAX_IMPORTS."""
    found = {}
    for path in files():
        tree = ast.parse(path.read_text(encoding="utf-8"))
        modules = {
            node.module
            for node in ast.walk(tree)
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(("fleetune", "benchmarks"))
        }
        if len(modules) > MAX_IMPORTS:
            found[str(path.relative_to(ROOT))] = len(modules)
    return found


def main() -> int:
    """Print both lists."""
    for title, found in (
        (f"classes above {MAX_ATTRIBUTES} attributes", large_classes()),
        (f"files above {MAX_IMPORTS} imported modules of ours", large_importers()),
    ):
        print(f"{title}: {len(found)}")
        for name, number in sorted(found.items(), key=lambda item: -item[1]):
            print(f"  {number}  {name}  {LARGE_CLASSES.get(name, 'to be divided')}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
