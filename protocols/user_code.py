"""A user's own code, `package.module:function`, is looked for in the current folder too, and there last.

No folder a user stands in may hide a package of ours or of the libraries: one named `tools` beside a run.toml
is common.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType

from fleetune.protocols.errors import FleetuneError, ModelError
from fleetune.protocols.old_names import OldNames


class _CurrentFolder(MetaPathFinder):
    def find_spec(self, name: str, path: object, target: object = None) -> ModuleSpec | None:  # noqa: ARG002
        return PathFinder.find_spec(name, [str(Path.cwd())]) if path is None else None


_finders = (_CurrentFolder(), OldNames())


def user_module(name: str) -> ModuleType:
    """The module `name`, imported. Raises whatever its code raises, ImportError when there is none."""
    sys.meta_path.extend(finder for finder in _finders if finder not in sys.meta_path)
    return import_module(name)


def as_line(problem: Exception) -> str:
    """An exception as one line."""
    return " ".join(f"{type(problem).__name__}: {problem}".split())


@contextmanager
def running_model(name: str, what: str) -> Iterator[None]:
    """A user's module runs inside; what it raises becomes a ModelError: `what`, and why."""
    try:
        yield
    except FleetuneError:
        raise
    except Exception as problem:  # a user's module may raise anything
        raise ModelError(f"model {name!r} {what}: {as_line(problem)}") from problem
