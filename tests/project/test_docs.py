"""What documents and docstrings name exists: files, modules, their attributes, commands, links, messages."""

import importlib
import importlib.util
import re
from functools import cache
from pathlib import Path
from typing import get_args

import pytest
from tests.helpers.places import ROOT

from fleetune.protocols.methods import REGISTRY
from fleetune.protocols.wire.messages import (
    Ack,
    FromDevice,
    Offer,
    ToDevice,
    TransferKey,
    encode,
)
from fleetune.protocols.wire.transfer import Chunk, digest_of, transfer_id

FLOORS = ("protocols", "coordinator", "edge_agent", "firmware_profiles", "tools")
FOLDERS = (*FLOORS, "benchmarks", "tests", "examples", "docs")
USERS_OWN = {"mymethods.py", "mymodels.py"}  # made up, as a user's own would be called
OF_OTHERS = {"tests/project/test_wheel.py"}  # writes such files
OLD_NAMES = ROOT / "docs" / "renames.md"  # lists names that are gone
DOCUMENTS = [
    path
    for path in (ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md")))
    if path != OLD_NAMES
]
SOURCES = [path for folder in FOLDERS[:-1] for path in sorted((ROOT / folder).rglob("*.py"))]
READ = [path for path in (*DOCUMENTS, *SOURCES) if str(path.relative_to(ROOT)) not in OF_OTHERS]

_FILE = re.compile(rf"(?<![\w./~-])(?:{'|'.join(FOLDERS)})/[\w/.-]*[\w/]")
_PYTHON = re.compile(r"(?<![\w/*<>-])\w+\.py\b")
_DOTTED = re.compile(
    rf"`(?:fleetune\.)?((?:{'|'.join(FLOORS)})(?:\.\w+)+)`|\bfleetune\.((?:{'|'.join(FLOORS)})(?:\.\w+)*)"
)
_PLACEHOLDER = re.compile(r"[A-Z]{4,}")  # NAME, COMMIT: for the reader to fill in
_COMMAND = re.compile(rf"python (?:-\w+ )*-m ((?:fleetune|{'|'.join(FOLDERS)})\b[\w.]*)")
_LINK = re.compile(r"\]\((?!https?:|#)([^)#\s]+)")
_FENCED = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)


def cited(path: Path) -> str:
    """The text of a document or of a source, docstrings and comments included."""
    return path.read_text(encoding="utf-8")


@cache
def python_names() -> set[str]:
    return {path.name for path in SOURCES}


def exists(name: str) -> bool:
    """Whether `name` below fleetune is a package, a module, or something in one."""
    parts = name.split(".")
    for count in range(len(parts), 0, -1):
        module = ROOT.joinpath(*parts[:count])
        if module.is_dir() or module.with_suffix(".py").exists():
            rest = parts[count:]
            return not rest or holds(".".join(["fleetune", *parts[:count]]), rest)
    return False


def holds(module: str, attributes: list[str]) -> bool:
    found = importlib.import_module(module)
    for attribute in attributes:
        names = getattr(found, "__annotations__", {}), getattr(found, "__struct_fields__", ())
        if not hasattr(found, attribute) and not any(attribute in known for known in names):
            return False
        found = getattr(found, attribute, None)
    return True


def runnable(name: str) -> bool:
    """Whether `python -m name` finds something."""
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # a package above it
        return False


def missing_names(path: Path) -> list[str]:
    """Files, modules and names that a document or source mentions and that do not exist."""
    text = cited(path)
    files = [name for name in _FILE.findall(text) if not _PLACEHOLDER.search(name)]
    dotted = ["".join(pair) for pair in _DOTTED.findall(text)]
    gone = [name for name in files if not (ROOT / name).exists()]
    gone += [name for name in dotted if not name.endswith(".py") and not exists(name)]
    if "tests" not in path.relative_to(ROOT).parts:  # which write files of their own
        gone += [name for name in _PYTHON.findall(text) if name not in python_names() | USERS_OWN]
    return gone


def test_what_is_named_exists():
    missing = {str(path.relative_to(ROOT)): missing_names(path) for path in READ}
    assert {path: names for path, names in missing.items() if names} == {}


def dead_references(path: Path) -> list[str]:
    """Links of a document that lead nowhere, and modules that its commands start and that do not exist."""
    text = cited(path)
    dead = [link for link in _LINK.findall(_FENCED.sub("", text)) if not (path.parent / link).exists()]
    return dead + [name for name in _COMMAND.findall(text) if not runnable(name)]


def test_commands_and_links_lead_somewhere():
    dead = {str(path.relative_to(ROOT)): dead_references(path) for path in DOCUMENTS}
    assert {path: names for path, names in dead.items() if names} == {}


def test_the_readme_is_short_and_counts_right():
    text = cited(ROOT / "README.md")
    assert len(text.splitlines()) <= 200
    assert f"**{len(REGISTRY)} methods**" in text


def test_the_page_on_the_wire_has_every_message():
    page = cited(ROOT / "docs" / "wire.md")
    messages = {kind.__name__ for union in (FromDevice, ToDevice) for kind in get_args(union)}
    assert messages == set(
        re.findall(r"^\| `([A-Z]\w+)` \| (?:device|coordinator|both) \|", page, re.MULTILINE)
    )


def test_the_page_on_the_wire_shows_the_bytes_that_travel():
    page, payload = cited(ROOT / "docs" / "wire.md"), b"fleetune"
    key, digest = TransferKey("task", "fashion-1f2e3d4c", 3, 1), digest_of(payload)
    name = transfer_id(key, "pi-kitchen", digest)
    offer, ack = Offer(name, digest, len(payload), key), Ack(name, len(payload))
    for shown in (encode(offer).decode(), encode(ack).decode(), Chunk(name, 0, payload).encode().hex()):
        assert f"\n{shown}\n" in page


def test_the_models_on_their_page_train_as_they_are_printed():
    architectures = pytest.importorskip("fleetune.protocols.model.architectures")
    from fleetune.protocols.model.interface import interface_of_shapes
    from fleetune.protocols.model.torch_interface import attach, with_types

    page = cited(ROOT / "docs" / "your-model.md")
    net, several = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    made: dict = {}
    exec(net, made)
    architectures.try_out("mymodels:net", made["net"]((3, 32, 32), 10), (3, 32, 32), 10)
    exec(several, made := {})
    shapes = {"image": (1, 8, 8), "age": (1,), "place": ()}
    module = made["image_and_age"](shapes, 3)
    attach("mymodels:image_and_age", module, with_types("m", module, interface_of_shapes(shapes)))
    architectures.try_out("mymodels:image_and_age", module, (66,), 3)
