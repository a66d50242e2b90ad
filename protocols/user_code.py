"""Imports a user's own code, named `package.module:function`.

The current folder is searched last. So a folder of the user, such as `tools` next to a run.toml, cannot hide
a package of Fleetune or of a library.
"""

import sys
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

from fleetune.protocols.errors import FleetuneError, ModelError


class _CurrentFolder(MetaPathFinder):
    def find_spec(self, name: str, path: object, target: object = None) -> ModuleSpec | None:  # noqa: ARG002
        return PathFinder.find_spec(name, [str(Path.cwd())]) if path is None else None


_MAX_LINE = 1000  # characters of a message from a user's code
_finders = (_CurrentFolder(),)
_PYTHON = (*{sysconfig.get_path(name) for name in ("stdlib", "platstdlib")}, "<frozen", "built-in")
_PACKAGE = str(Path(__file__).parents[1])  # src/fleetune, or the installed package
_INSTALLED = tuple({sysconfig.get_path(name) for name in ("purelib", "platlib")})


def user_module(name: str) -> ModuleType:
    """Import the module `name`. Raises what its code raises, or ImportError if there is none."""
    _look_here_too()
    return import_module(name)


def user_module_file(name: str) -> Path | None:
    """Return the file of the module `name` without importing it (its packages are imported).

    The result is None if there is no such module, or if it belongs to Python or to Fleetune.
    """
    _look_here_too()
    try:
        found = find_spec(name)
    except Exception:  # noqa: BLE001 - a user's package may raise anything
        return None
    file = None if found is None or not found.has_location else found.origin
    if file is None or file.startswith(_PACKAGE) or (file.startswith(_PYTHON) and not is_installed(file)):
        return None
    return Path(file)


def is_installed(file: str) -> bool:
    """True if a file lies in a folder of installed packages."""
    return file.startswith(_INSTALLED)


def is_library(file: str) -> bool:
    """True if a file belongs to Python, an installed package, or Fleetune."""
    return file.startswith((*_PYTHON, *_INSTALLED, _PACKAGE))


def _look_here_too() -> None:
    sys.meta_path.extend(finder for finder in _finders if finder not in sys.meta_path)


def as_line(problem: BaseException) -> str:
    """Return an exception as one line of at most 1,000 characters."""
    try:
        words = str(problem)
    except Exception:  # noqa: BLE001 - the exception's class is a user's, too
        words = "its message cannot be read"
    line = " ".join(f"{type(problem).__name__}: {words}".split())
    return line if len(line) <= _MAX_LINE else f"{line[:_MAX_LINE]}..."


@contextmanager
def running_model(name: str, what: str) -> Iterator[None]:
    """Turn exceptions of a user's module in this context into a ModelError with `what` and the reason."""
    try:
        yield
    except FleetuneError:
        raise
    except Exception as problem:  # a user's module may raise anything
        raise ModelError(f"model {name!r} {what}: {as_line(problem)}") from problem
