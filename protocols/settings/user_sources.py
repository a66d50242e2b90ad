"""The user's source files that a run depends on, with digests of their content.

The digests belong to the identity of a run. Settings name code as `package.module:function`: methods, models,
losses, data, augmentation. A file counts together with the files that it imports from the same folder, or
from the same package if the package is installed.
"""

import ast
import hashlib
import linecache
import re
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from importlib import invalidate_caches
from pathlib import Path
from types import CodeType
from typing import Any

import msgspec

from fleetune.protocols.user_code import is_installed, user_module_file

MOST_FILES = 1000
_OF_OTHER_RUNS = ("compare", "paper")  # sections of run.toml that a run ignores
_NAMED = re.compile(r"([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*):([A-Za-z_]\w*)")
_BEGAN_S = time.time()
_loaded: dict[str, str] = {}  # digest of each file when this process imported it

Sources = Mapping[str, str]


def user_sources(settings: object) -> Sources:
    """Return a digest of each user file that `settings` name, by the file's path in its folder.

    A module whose file was edited after this process imported it is imported again at its next use.

    Args:
        settings: settings of a run, or any object that contains settings.
    """
    values = msgspec.to_builtins(settings)
    if isinstance(values, dict):
        values = {section: value for section, value in values.items() if section not in _OF_OTHER_RUNS}
    sources: dict[str, str] = {}
    files: dict[Path, str] = {}
    for module, attribute in dict.fromkeys(_named(values)):
        file = user_module_file(module)
        if file is not None:
            folder, within = _root(file, module)
            for one in _with_imports(file, module, folder, within):
                files[one] = sources[one.relative_to(folder).as_posix()] = _digest(_content(one))
        elif module == "__main__":
            typed = _typed_in(getattr(sys.modules[module], attribute, None))
            sources[f"{module}:{attribute}"] = _digest(typed)
    _import_anew({str(file): digest for file, digest in files.items()})
    return dict(sorted(sources.items()))


def changed(before: Sources, now: Sources) -> str:
    """Return a text that names the files that differ; "" if none does."""
    words = [
        f"{name} is {'new' if name not in before else 'gone' if name not in now else 'edited'}"
        for name in sorted({*before, *now})
        if before.get(name) != now.get(name)
    ]
    return ", ".join(words[:3]) + (f" and {len(words) - 3} more" if len(words) > 3 else "")


def _named(value: Any) -> Iterator[tuple[str, str]]:
    """Module and attribute of each `package.module:function` in the settings."""
    if isinstance(value, dict):
        for one in value.values():
            yield from _named(one)
    elif isinstance(value, list | tuple):
        for one in value:
            yield from _named(one)
    elif isinstance(value, str) and (found := _NAMED.match(value)):
        yield found[1], found[2]


def _root(file: Path, module: str) -> tuple[Path, Path]:
    """Return the folder where the module's dotted name begins, and the folder whose imports count."""
    parts = module.split(".")
    is_package = file.name == "__init__.py"
    folder = file.parents[len(parts) - (0 if is_package else 1)]
    return folder, folder / parts[0] if is_installed(str(file)) else folder


def _with_imports(file: Path, module: str, folder: Path, within: Path) -> list[Path]:
    """Return a module's file, its packages' files, and the files in `within` that these import."""
    found = dict.fromkeys([file, *_files(folder, module.split("."))])
    todo = list(found)
    while todo and len(found) < MOST_FILES:
        for one in _imported(todo.pop(), folder):
            if one not in found and one.is_relative_to(within):
                found[one] = None
                todo.append(one)
    return list(found)


def _imported(file: Path, folder: Path) -> Iterator[Path]:
    """Yield the files in `folder` that `file` imports, with the files of their packages."""
    try:
        tree = ast.parse(_content(file))
    except (SyntaxError, ValueError, RecursionError):
        return
    package = file.relative_to(folder).parent.parts
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield from _files(folder, alias.name.split("."))
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) + 1 - node.level] if node.level else ()
            start = [*above, *(node.module or "").split(".")] if node.module else list(above)
            for alias in node.names:
                yield from _files(folder, [*start, alias.name])


def _files(folder: Path, parts: list[str]) -> Iterator[Path]:
    """Yield the files of a dotted name: each package's `__init__.py` and the module. The last part may be no
    module.
    """
    for end in range(1, len(parts) + 1):
        place = folder.joinpath(*parts[:end])
        for file in (place / "__init__.py", place.with_name(f"{place.name}.py")):
            if file.is_file():
                yield file


def _content(file: Path) -> bytes:
    """Return the content of a file; empty if it cannot be read, because the import will report that."""
    with suppress(OSError):
        return file.read_bytes()
    return b""


def _typed_in(thing: Any) -> bytes:
    """Return the source text of the notebook cells or the script that define a class or function."""
    codes = [one.__code__ for one in (thing, *vars(thing).values()) if _has_code(one)] if thing else []
    files = dict.fromkeys(code.co_filename for code in codes)
    return "".join(line for file in files for line in linecache.getlines(file)).encode()


def _has_code(thing: Any) -> bool:
    return isinstance(getattr(thing, "__code__", None), CodeType)


def _digest(content: bytes) -> str:
    return hashlib.sha256(content.replace(b"\r\n", b"\n")).hexdigest()[:16]


def _import_anew(files: Mapping[str, str]) -> None:
    """Remove these modules from `sys.modules` if one of the files was edited after its import."""
    edited = [file for file, digest in files.items() if _loaded.get(file, digest) != digest]
    edited += [file for file in files if file not in _loaded and Path(file).stat().st_mtime > _BEGAN_S]
    if edited:
        mine = [name for name, one in sys.modules.items() if getattr(one, "__file__", None) in files]
        for name in mine:
            if name != "__main__":
                del sys.modules[name]
        invalidate_caches()
    _loaded.update(files)
