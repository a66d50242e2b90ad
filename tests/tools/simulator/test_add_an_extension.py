"""The extensions of docs/add-an-extension.md run in a simulation as they are printed there."""

import re
import sys
from types import ModuleType

import pytest
from tests.helpers.places import ROOT
from tests.tools.simulator.test_simulate import settings

from fleetune.coordinator.extensions import order as coordinator_order
from fleetune.coordinator.run.run_events import Notice
from fleetune.edge_agent.extensions import order as device_order
from fleetune.edge_agent.extensions import session_state
from fleetune.edge_agent.extensions.adoption.adoption import Adoption
from fleetune.edge_agent.extensions.session_state import read_state
from fleetune.protocols.methods import from_section
from fleetune.tools.simulator import starting_models
from fleetune.tools.simulator.runner import simulate

PAGE = ROOT / "docs" / "add-an-extension.md"


@pytest.fixture
def printed(monkeypatch):
    """The module with both classes of the page, each in the order of its side."""
    module = ModuleType("printed_extensions")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    for code in re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL):
        exec(code, vars(module))
    place = device_order.ORDER.index(Adoption)
    device = (*device_order.ORDER[:place], module.Progress, *device_order.ORDER[place:])
    for reader in (device_order, session_state):
        monkeypatch.setattr(reader, "ORDER", device)
    monkeypatch.setattr(session_state, "_stored_slots", session_state._stored_slots.__wrapped__)  # not cached
    coordinator = (*coordinator_order.ORDER, module.FirstReplies)
    monkeypatch.setattr(coordinator_order, "ORDER", coordinator)
    return module


class Notices:
    """Keeps the messages of a run."""

    def __init__(self):
        self.lines = []

    def observe(self, event):
        if isinstance(event, Notice):
            self.lines.append(event.line)


def run_of(folder, observers=(), **data):
    wanted = settings(
        run={"name": "sim", "rounds": 4, "final_evaluation": False},
        data={"validation_fraction": 0.3, "partition": {"kind": "iid", "samples": 60}, **data},
        round={"participants": 2},
    )
    run, _ = simulate(wanted, folder, workers=0, fresh=True, observers=observers)
    return run


def states_of(run):
    method = from_section(run.enrolment.method, run.enrolment.spec)
    files = [starting_models.state_file(run.folder / "devices", f"device-{n}") for n in range(6)]
    return [read_state(data, method) for file in files if (data := file.read()) is not None]


def test_the_devices_count_rounds_that_beat_their_best_checkpoint(printed, tmp_path):
    run = run_of(tmp_path / "sim")
    counts = [state.slots["progress"] for state in states_of(run) if "best_checkpoint" in state.slots]
    replies = sum(len(record.devices) for record in run.controller.records())
    run.store.close()
    assert 0 < sum(counts) <= replies - len(counts)  # a device's first round has no model to beat


def test_a_device_without_validation_samples_does_not_use_it(printed, tmp_path):
    run = run_of(tmp_path / "sim", validation_fraction=0.0)
    run.store.close()
    assert all("progress" not in state.slots for state in states_of(run))


def test_the_coordinator_announces_every_device_once(printed, tmp_path):
    notices = Notices()
    run = run_of(tmp_path / "sim", observers=[notices])
    replied = [device for record in run.controller.records() for device in sorted(record.devices)]
    run.store.close()
    expected = [f"{device} has replied for the first time" for device in dict.fromkeys(replied)]
    assert len(expected) < len(replied)
    assert [line for line in notices.lines if line.endswith("for the first time")] == expected
