"""What users wrote while a package of ours was called `protocols` is read; what is theirs comes first."""

import sys

import pytest
from tests.helpers.places import OLD_STATES, ROOT
from tests.tools.simulator.test_simulate import play

from fleetune.protocols.errors import DataError, SettingError
from fleetune.protocols.method.averaging import ModelAveraging
from fleetune.protocols.methods import create
from fleetune.protocols.methods.fedavg import FedAvg
from fleetune.protocols.methods.kapc.kapc import KAPC
from fleetune.protocols.user_code import user_module


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """Where the user stands; its modules are forgotten afterwards."""
    before, finders = set(sys.modules), list(sys.meta_path)
    for name in before:
        if name.partition(".")[0] in ("protocols", "mymethods", "mine"):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.setattr(sys, "path", [one for one in sys.path if one not in ("", str(ROOT))])
    yield tmp_path
    sys.meta_path[:] = finders
    for name in set(sys.modules) - before:
        if not name.startswith("fleetune"):
            del sys.modules[name]


def own(folder, name, text):
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_a_method_written_for_the_release_before_runs_and_says_what_to_change(folder, caplog):
    """The one that docs/add-a-method.md printed then."""
    own(folder, "mymethods.py", (OLD_STATES / "mymethods-6e33d00.txt").read_text())
    _, summary, _ = play(folder, "a", method={"name": "mymethods:TopChanges"})
    assert summary.rounds
    assert issubclass(sys.modules["mymethods"].TopChanges, ModelAveraging)
    assert "`protocols.exchange` is an old name: import from `fleetune` instead" in caplog.text


def test_a_built_in_method_is_found_by_its_old_place(spec):
    assert isinstance(create("protocols.methods.fedavg:FedAvg", spec, {}), FedAvg)
    assert isinstance(create("protocols.methods.kapc:KAPC", spec, {}), KAPC)
    with pytest.raises(SettingError, match="has no attribute 'FedNothing'"):
        create("protocols.methods.fedavg:FedNothing", spec, {})


def test_the_users_own_modules_of_such_names_come_first(folder):
    own(folder, "protocols/codec.py", "estimate_bytes = 'mine'\n")
    own(
        folder,
        "protocols/mydata.py",
        "from protocols.codec import estimate_bytes\nfrom protocols.errors import DataError\n",
    )
    found = user_module("protocols.mydata")
    assert found.estimate_bytes == "mine"
    assert found.DataError is DataError


def test_what_never_was_public_is_not_there(folder):
    own(folder, "mine.py", "from protocols.codec import payload_limit\n")
    with pytest.raises(ImportError, match="cannot import name 'payload_limit'"):
        user_module("mine")
    with pytest.raises(ModuleNotFoundError, match=r"protocols\.wire"):
        user_module("protocols.wire")
