"""What an agent stored is read again: in its extremes, after an upgrade, and never by an older program."""

import tarfile
from dataclasses import replace

import numpy as np
import pytest
from msgspec import structs
from tests.conftest import PullToTarget, tiny_spec
from tests.helpers.every_method import SETTINGS
from tests.helpers.places import OLD_STATES
from tests.helpers.world import CAPABILITY, CHOICES

from fleetune.edge_agent.budget.cost_forecast import Capability
from fleetune.edge_agent.budget.cost_history import CostHistory, Demand, PastRound
from fleetune.edge_agent.budget.owner_policy import Policy
from fleetune.edge_agent.budget.ratio_controller import RatioController, read_ratio_controller
from fleetune.edge_agent.extensions.session_state import Kept
from fleetune.edge_agent.run.session import Session
from fleetune.edge_agent.state import state_versions
from fleetune.edge_agent.state.agent_store import AgentStore, FileMemory
from fleetune.edge_agent.state.state_folder import agent_files
from fleetune.edge_agent.state.state_versions import Layout
from fleetune.firmware_profiles import load
from fleetune.protocols.conditions import Conditions
from fleetune.protocols.errors import StoreVersion
from fleetune.protocols.method.choice import Budget, DeviceReport
from fleetune.protocols.methods import REGISTRY, create, from_section
from fleetune.protocols.round_cost import RoundCost
from fleetune.protocols.update import codec
from fleetune.protocols.wire.payloads import Enrolment

SPEC = tiny_spec()
RELEASES = ("d2699e9", "6e33d00")  # agent-*.tar.xz, made by make_agent_state.py beside them
TRAINS_OTHERWISE = {("d2699e9", "per-fedavg")}  # since then, on purpose: by the run's batches and epochs
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
    "a link that carries nothing": ratio_controller(replace(CAPABILITY, uplink_bps=TINY, downlink_bps=TINY)),
    "a link without end": ratio_controller(replace(CAPABILITY, uplink_bps=HUGE, downlink_bps=HUGE)),
    "a latency without end": ratio_controller(replace(CAPABILITY, latency_s=float("inf"))),
    "a board that stands still": ratio_controller(replace(CAPABILITY, samples_per_s=TINY)),
    "a board that draws all there is": ratio_controller(replace(CAPABILITY, train_w=HUGE)),
    "a board without samples that stands still": ratio_controller(
        replace(CAPABILITY, samples_per_s=TINY, num_samples=0)
    ),
    "sensors at their ends": ratio_controller(
        conditions=Conditions(2**60, "battery", 1.0, 1e9, 10_000.0, throttled=True, metered=True)
    ),
    "nothing known": ratio_controller(Capability(0, 1, 1, 0, 0.0)),
}


@pytest.mark.parametrize("known", EXTREMES.values(), ids=EXTREMES)
def test_what_a_device_can_afford_is_remembered_in_every_state(known, tmp_path):
    for one in (known, structs.replace(known, cost_history=CostHistory()).chosen(Conditions())):
        memory = FileMemory(tmp_path / "allowance", state_versions.RATIO_CONTROLLER)
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


@pytest.mark.parametrize(("name", "settings"), SETTINGS, ids=str)
@pytest.mark.parametrize("value", [0.0, -0.0, np.nan, np.inf, -np.inf, 3e38, 1e-45])
def test_a_session_is_kept_whatever_its_weights_have_come_to(name, settings, value):
    method = create(name, SPEC, settings)
    kept = Kept("r", method.init_device(np.full(SPEC.size, value, np.float32)), 2**31, 2**31, b"reply")
    data = codec.encode(kept, SPEC)
    again = codec.decode(data, Kept[method.device_state_type], SPEC, finite=False)
    assert codec.encode(again, SPEC) == data
    assert method.personal_model(again.state).tobytes() == method.personal_model(kept.state).tobytes()


def test_content_is_brought_up_step_by_step_and_a_newer_one_is_left_alone(tmp_path):
    path = tmp_path / "file"
    layout = Layout(tuple(lambda content, step=step: content + step for step in (b"1", b"2", b"3")))
    path.write_bytes(b"FLTN from before versions")
    assert FileMemory(path, layout).read() == b"FLTN from before versions123"
    FileMemory(path, Layout(layout.migrations[:2])).write(b"second")
    assert FileMemory(path, layout).read() == b"second3"
    FileMemory(path, layout).write(b"third")
    written = path.read_bytes()
    with pytest.raises(StoreVersion, match=r"file is from another version \(3; this program reads up to 1\)"):
        FileMemory(path).read()
    assert path.read_bytes() == written


@pytest.mark.parametrize("content", [b"", b"F", b"FLTS", b"FLTS\1\0\0"])
def test_a_file_that_was_cut_short_is_no_version_of_anything(tmp_path, content):
    (tmp_path / "file").write_bytes(content)
    assert FileMemory(tmp_path / "file").read() == content


@pytest.fixture(params=RELEASES)
def release(request):
    return request.param


@pytest.fixture
def old(release, tmp_path):
    """State of a release before, and what that release did next."""
    with tarfile.open(OLD_STATES / f"agent-{release}.tar.xz") as tar:
        tar.extractall(tmp_path, filter="data")
    return AgentStore(tmp_path / "state" / "fleet" / "pi"), tmp_path / "next"


@pytest.mark.parametrize("name", REGISTRY)
def test_a_session_of_a_release_before_goes_on_bit_for_bit(old, release, name):
    store, following = old
    if name not in store.runs():
        pytest.skip(f"{name} is newer")
    then = {path.name: path.read_bytes() for path in (following / name).iterdir()}
    enrolment = codec.decode(store.enrolment(name).read(), Enrolment, None)
    method = from_section(enrolment.method, enrolment.spec)
    session = Session(enrolment, "pi", method, PullToTarget(SPEC, "pi"), store.session(name))
    assert session.personal_model.tobytes() == then["model"]
    reply = session.reply(then["task"], Budget(0.5))
    assert (reply == then["reply"]) == ((release, name) not in TRAINS_OTHERWISE)
    again = Session(enrolment, "pi", method, None, store.session(name))
    assert again.reply(then["task"], Budget(0.5)) == reply
    assert again.personal_model.tobytes() == session.personal_model.tobytes()


def test_the_reply_to_the_last_task_is_still_there(old):
    store, following = old
    enrolment = codec.decode(store.enrolment("fedavg").read(), Enrolment, None)
    kept = codec.decode(
        store.session("fedavg").read(),
        Kept[from_section(enrolment.method, enrolment.spec).device_state_type],
        enrolment.spec,
    )
    assert (kept.round, kept.reply) == (2, (following / "fedavg" / "last").read_bytes())


def test_cost_history_of_a_release_before_is_kept_also_where_nothing_fitted(old):
    store, _ = old
    well, badly = (read_ratio_controller(store.ratio_controller(run).read()) for run in ("fedavg", "fedprox"))
    assert (well.fits, badly.fits) == (True, False)
    assert well.cost_history == badly.cost_history
    assert [lesson.actual.train_s for lesson in well.cost_history.past_rounds] == [3.0]
    assert well.capability.uplink_bps == 2e6
    assert badly.report.reason.startswith("nothing fits")
    assert badly.chosen(Conditions()).report == badly.report


def test_all_else_of_a_release_before_is_read_and_marked_and_can_be_wiped(old):
    store, _ = old
    store.claim().close()
    assert store.bundle("fedavg") == b"some bundle"
    assert store.task("fedavg", "1" * 32).read() == b"some task"
    (found,) = agent_files(store.folder)
    assert len(found.runs) == len(store.runs()) > 25
    assert found.foreign == ()
