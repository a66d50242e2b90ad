"""List the benchmarks: `python -m benchmarks`."""

import ast

from benchmarks import CHECKOUT

NAMES = (
    "simulators",
    "growth",
    "ratios",
    "robust",
    "wire",
    "encodings",
    "shaped_links",
    "trainers",
    "agent_memory",
    "model_memory",
    "round_memory",
    "long_run",
)


def first_line(name: str) -> str:
    """First line of a benchmark's docstring, read without importing it."""
    folder = CHECKOUT / "benchmarks" / name
    file = folder / "__init__.py" if folder.is_dir() else folder.with_suffix(".py")
    return (ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or "").partition("\n")[0]


if __name__ == "__main__":
    for each in NAMES:
        print(f"python -m benchmarks.{each:13} {first_line(each)}")
