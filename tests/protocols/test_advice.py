"""What a message tells a user to install exists: every package in it is one that pyproject.toml names too."""

import ast
import re
import tomllib
from itertools import chain

import pytest
from tests.helpers.places import ROOT

from fleetune.edge_agent.training.trainers import KINDS, PIP

PACKAGES = ("protocols", "edge_agent", "coordinator", "tools", "firmware_profiles")
ADVICE = re.compile(r"pip install ((?:-\S+ )*)'?([A-Za-z][A-Za-z0-9_.\[\]-]*)")


def known():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    listed = [*project["dependencies"], *chain.from_iterable(project["optional-dependencies"].values())]
    names = {re.match(r"[A-Za-z0-9_-]+", one).group() for one in listed}
    return names - {project["name"]}  # which no registry has


def texts(file):
    """Every string of a Python file, as its reader sees it: the parts of an f-string together."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.JoinedStr):
            yield "".join(part.value if isinstance(part, ast.Constant) else "{}" for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def advised():
    files = [file for package in PACKAGES for file in (ROOT / package).rglob("*.py")]
    return {(file.name, found[1]) for file in files for text in texts(file) for found in ADVICE.findall(text)}


def test_what_messages_advise_is_what_pyproject_names():
    found = advised()
    assert {"onnxruntime", "torch", "matplotlib", "amqtt", "scikit-learn"} <= {name for _, name in found}
    assert {name for _, name in found} <= known(), found


@pytest.mark.parametrize("kind", KINDS)
def test_every_trainer_has_a_package(kind):
    assert PIP[kind].split()[-1].partition("==")[0] in known()


def test_no_text_sends_a_user_to_a_registry_for_us():
    files = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").rglob("*.toml")]
    for file in files + [file for package in PACKAGES for file in (ROOT / package).rglob("*.py")]:
        assert not re.search(r"pip install ['\"]?fleetune|fleetune\[", file.read_text(encoding="utf-8")), file
