"""What an agent stored is read again, also in its extremes; another format version is migrated or refused."""

from dataclasses import replace

import numpy as np
import pytest
from msgspec import structs
from tests.conftest import tiny_spec
from tests.helpers.every_method import SETTINGS
from tests.helpers.nightly import of_methods
from tests.helpers.world import CAPABILITY, CHOICES, behind

from fleetune.edge_agent.budget.cost_forecast import Capability, ModelSize
from fleetune.edge_agent.budget.cost_history import CostHistory, Demand, PastRound
from fleetune.edge_agent.budget.owner_policy import Policy
from fleetune.edge_agent.budget.ratio_controller import RatioController, read_ratio_controller
from fleetune.edge_agent.extensions.session_state import SessionState, read_state
from fleetune.edge_agent.state.agent_store import FileMemory
from fleetune.edge_agent.state.state_versions import FIRST, Layout
from fleetune.firmware_profiles import load
from fleetune.protocols.conditions import Conditions
from fleetune.protocols.errors import StoreVersion
from fleetune.protocols.method.choice import DeviceReport
from fleetune.protocols.methods import create
from fleetune.protocols.round_cost import RoundCost
from fleetune.protocols.update import codec

SPEC = tiny_spec()
TINY, HUGE = 5e-324, 1e308
LESSON = PastRound(Demand(0.5, 500, 500, 100.0, 10**6), RoundCost(500, 500, 0.001, 1.0, 0.001, 10**8, 1.0))


def ratio_controller(capability=CAPABILITY, deadline_s=20.0, conditions=Conditions(), **policy):  # noqa: B008
    report = DeviceReport("d", num_samples=CAPABILITY.num_samples)
    board = load("raspberry-pi-4b")
    chosen = RatioController(CHOICES, capability, board, Policy(**policy), deadline_s, report)
    return structs.replace(chosen, cost_history=CostHistory((LESSON,))).chosen(conditions)


EXTREMES = {
    "nothing fits the deadline": ratio_controller(deadline_s=TINY),
    "nothing fits the memory": ratio_controller(max_memory_mb=TINY),
    "nothing fits the battery": ratio_controller(
        max_battery_percent_per_hour=TINY, conditions=Conditions(power="battery", battery=0.0)
    ),
    "no deadline": ratio_controller(deadline_s=float("inf")),
    "a link that carries nothing": ratio_controller(behind(uplink_bps=TINY, downlink_bps=TINY)),
    "a link without end": ratio_controller(behind(uplink_bps=HUGE, downlink_bps=HUGE)),
    "a latency without end": ratio_controller(behind(latency_s=float("inf"))),
    "a board that stands still": ratio_controller(replace(CAPABILITY, samples_per_s=TINY)),
    "a board that draws all there is": ratio_controller(
        replace(CAPABILITY, watts=replace(CAPABILITY.watts, train=HUGE))
    ),
    "a board without samples that stands still": ratio_controller(
        replace(CAPABILITY, samples_per_s=TINY, num_samples=0)
    ),
    "sensors at their ends": ratio_controller(
        conditions=Conditions(2**60, "battery", 1.0, 1e9, 10_000.0, throttled=True, metered=True)
    ),
    "nothing known": ratio_controller(Capability(0, 1, 1, ModelSize(0, 0.0))),
}


@pytest.mark.parametrize("known", EXTREMES.values(), ids=EXTREMES)
def test_what_a_device_can_afford_is_remembered_in_every_state(known, tmp_path):
    for one in (known, structs.replace(known, cost_history=CostHistory()).chosen(Conditions())):
        memory = FileMemory(tmp_path / "allowance")
        memory.write(one.encoded())
        again = read_ratio_controller(memory.read())
        assert again is not None
        assert again.fits == one.fits
        assert (again.report, again.predicted) == (one.report, one.predicted)
        assert again.cost_history == one.cost_history
        assert again.capability == one.capability


def test_where_nothing_fits_the_ratio_stays_one_that_a_report_may_hold():
    known = ratio_controller()
    nothing = structs.replace(known, deadline_s=TINY).chosen(Conditions())
    assert not nothing.fits
    assert nothing.report.ratio == known.report.ratio
    assert nothing.report.reason.startswith("nothing fits")
    assert structs.replace(nothing, deadline_s=20.0).chosen(Conditions()).fits


@pytest.mark.parametrize(("name", "settings"), of_methods(SETTINGS), ids=str)
@pytest.mark.parametrize("value", [0.0, -0.0, np.nan, np.inf, -np.inf, 3e38, 1e-45])
def test_a_session_is_kept_whatever_its_weights_have_come_to(name, settings, value):
    method = create(name, SPEC, settings)
    kept = SessionState(
        "r", method.init_device(np.full(SPEC.size, value, np.float32)), 2**31, 2**31, b"reply"
    )
    data = codec.encode(kept, SPEC)
    again = read_state(data, method)
    assert codec.encode(again, SPEC) == data
    assert method.personal_model(again.state).tobytes() == method.personal_model(kept.state).tobytes()


def test_content_is_migrated_step_by_step(tmp_path):
    """The synthetic example: a kind of file whose content changed three times since the first format."""
    path = tmp_path / "file"
    migrations = tuple(lambda content, step=step: content + step for step in (b"1", b"2", b"3"))
    FileMemory(path).write(b"first")
    assert FileMemory(path, Layout(migrations)).read() == b"first123"
    FileMemory(path, Layout(migrations[:2])).write(b"third")
    assert FileMemory(path, Layout(migrations)).read() == b"third3"
    FileMemory(path, Layout(migrations)).write(b"newest")
    assert FileMemory(path, Layout(migrations)).read() == b"newest"


@pytest.mark.parametrize("other", [FIRST - 1, FIRST + 1])
def test_a_file_of_another_format_is_refused_and_left_unchanged(tmp_path, other):
    path = tmp_path / "file"
    FileMemory(path, Layout(first=other)).write(b"content")
    written = path.read_bytes()
    line = f"file has format {other}; this program reads format {FIRST}: install the version of fleetune"
    with pytest.raises(StoreVersion, match=line):
        FileMemory(path).read()
    assert path.read_bytes() == written


@pytest.mark.parametrize("content", [b"", b"F", b"FLTS", b"FLTS\1\0\0", b"what an agent did not write"])
def test_a_file_whose_first_bytes_are_damaged_is_read_as_empty(tmp_path, content):
    (tmp_path / "file").write_bytes(content)
    assert FileMemory(tmp_path / "file").read() == b""
