"""The five papers' methods over several rounds on a real fleet, to the last bit their simulation.

What their coordinators keep from round to round comes about: memory, cube, Omega, delta and bar, trials. One
fleet, whose agents stay, plays one run after another.
"""

import numpy as np
import pytest
from tests.helpers.broker_bytes import Ear
from tests.helpers.fleet_processes import Fleet, assert_equal, run_toml, simulated

from fleetune.coordinator.run.stored_run import method_of
from fleetune.coordinator.store.method_state import read_state
from fleetune.coordinator.store.run_store import RunStore
from fleetune.protocols.update import codec
from fleetune.protocols.wire.compact_message import is_compact
from fleetune.protocols.wire.payloads import Enrolment

pytestmark = [pytest.mark.fleet, pytest.mark.nightly]

DEVICES = ("device-0", "device-1", "device-2")


def toml(method, *settings, learning_rate=0.02, **others):
    """A run that is called like its method."""
    text = run_toml(name=method, method=method, **others)
    more = "\n".join([f'name = "{method}"', *settings, "[data]", "validation_fraction = 0.2\n"])
    text = text.replace(f'name = "{method}"\n[data]\n', more)
    return text.replace("learning_rate = 0.02", f"learning_rate = {learning_rate}")


def state_of(folder):
    """What the coordinator of a finished run knows."""
    store = RunStore.open(folder / "state.sqlite")
    enrolment = codec.decode(store.get("enrolment"), Enrolment, None)
    state = read_state(store, method_of(enrolment).state_type, enrolment.spec)
    store.close()
    return state


def diagnostics_of(folder):
    """What the method told of each round of a finished run, and of each update in it."""
    store = RunStore.open(folder / "state.sqlite")
    records = store.records()
    store.close()
    return [
        (one.diagnostics, {device: reply.diagnostics for device, reply in one.devices.items()})
        for one in records
    ]


def check_compact(ear, found):
    """Whether small messages were, from `Ready` on, and as many bytes of updates went up as were counted."""
    said = [data for channel, data in ear.raw if channel == "up"]
    shortest = {"Measured": 120, "Offer": 105, "Ready": 220, "Ack": 42, "Resume": 42}
    for kind, most in shortest.items():
        sizes = [len(data) for data in said if is_compact(data) and ear.kind(data) == kind]
        assert sizes
        assert max(sizes) < most
    assert not [data for data in said if ear.kind(data) in ("Ready", "Measured") and not is_compact(data)]
    up = sum(len(data) - 24 for channel, data in ear.raw if channel == "update")  # a chunk's head
    assert up == sum(counted[1] + counted[3] for counted in found.traffic.values())


@pytest.fixture(scope="module")
def fleet(tmp_path_factory):
    """A broker and three agents that wait for runs."""
    with Fleet(tmp_path_factory.mktemp("fleet"), toml("fedavg")) as fleet:
        for device in DEVICES:
            fleet.start_agent(device, options=())
        yield fleet
        for agent in fleet.agents.values():
            assert not agent.lines("ERROR")
            assert agent.stop() == 0


@pytest.fixture
def play(fleet, tmp_path):
    """Plays a run on the fleet and in simulation: what it came to, and both coordinators' states."""

    def played(text):
        fleet.run_file.write_text(text)
        assert fleet.start_coordinator("--fleet", fleet.name).wait() == 0
        name = text.split('name = "')[1].split('"')[0]
        found, wanted = fleet.outcome(name), simulated(text, tmp_path / name)
        assert_equal(found, wanted)
        assert set(found.personal) == set(DEVICES)
        told = diagnostics_of(fleet.folder / "runs" / name)
        assert told == diagnostics_of(tmp_path / name)
        assert any(of_round or any(of_updates.values()) for of_round, of_updates in told)
        return found, state_of(fleet.folder / "runs" / name), state_of(tmp_path / name)

    return played


@pytest.mark.nightly
def test_fedspu_stops_a_device_early(fleet, play):
    text = toml("fedspu", "early_stopping = true", rounds=5, learning_rate=0.3)
    ear = Ear(fleet.broker.port, fleet.name)
    found, _, _ = play(text + '\n[encoding]\nup = "sketch"\ndown = "lowrank"\ncompact = true\n')
    ear.close()
    check_compact(ear, found)
    taking_part = [participants for *_, participants, _ in found.rounds[:-1]]
    assert set(taking_part[0]) == set(DEVICES)
    assert 0 < len(taking_part[-1]) < 3


def test_srp_pfeds_memory_prefers_rates(play):
    text = toml("srp-pfed", "num_rates = 5", "draws = 3", rounds=4)
    found, state, wanted = play(
        text + '\n[encoding]\nup = "int4"\ndown = "int8"\n'
    )  # what is left out is kept on the device
    assert np.array_equal(state.memory, wanted.memory)
    assert state.memory.max() > state.memory.min() + 0.1
    up = {reply[1] for _, _, _, replies in found.rounds[:-1] for reply in replies.values()}
    assert max(up) > 1.5 * min(up)  # values at their rates, and half a kilobyte that is the same for all


def test_kapcs_cube_leaves_equal_shares(play):
    _, state, wanted = play(toml("kapc", "relation_rate = 1.0", rounds=4, learning_rate=0.1))
    assert np.array_equal(state.cube, wanted.cube)
    assert np.allclose(state.cube.sum(axis=2), 1)
    assert abs(state.cube - 1 / 3).max() > 0.05


def test_bls_leaves_layers_out_both_ways(play):
    settings = ("relation_rate = 1.0", "self_threshold = 0.4")
    plain = '\n[encoding]\nup = "raw"\ndown = "raw"\n'  # else first weights take next to nothing, too
    found, state, wanted = play(toml("kapc-bls", *settings, rounds=5, learning_rate=0.1) + plain)
    assert np.array_equal(state.cube, wanted.cube)
    assert state.uploaded == wanted.uploaded
    assert 1 <= min(state.uploaded.values()) < 3
    down = [[reply[0] for reply in replies.values()] for _, _, _, replies in found.rounds[:-1]]
    assert max(down[0]) > 20 * min(down[-1])


@pytest.mark.nightly
def test_fedpurin_collaborates_until_beta_and_not_beyond(play, tmp_path):
    settings = ("tau = 0.5", "beta = 2")
    model = {"model": "cnn-fedspu-emnist"}
    found, state, wanted = play(toml("fedpurin", *settings, rounds=5, **model))
    shorter = simulated(toml("fedpurin", *settings, rounds=2, **model), tmp_path / "shorter")
    assert shorter.rounds[:2] == found.rounds[:2]
    until_beta = state_of(tmp_path / "shorter")
    assert any(held.collaborated is not None for held in until_beta.held.values())
    for device in DEVICES:
        held = state.held[device]
        assert np.array_equal(held.critical, wanted.held[device].critical)
        assert held.critical.any()
        assert held.collaborated is None
    assert (state.weights == 0).any(), "bar shrinks: what nobody sends is 0"


@pytest.mark.nightly
def test_dc_pfl_splits_by_a_trial_and_lets_layers_wait(play):
    settings = ("start_rounds = 1", "window = 1", "observe = 1", "low_discrepancy = 1.0")
    _, state, wanted = play(toml("dc-pfl", *settings, rounds=9))
    assert state.accepted == wanted.accepted > 0
    assert state.grouping.placed == wanted.grouping.placed
    assert state.grouping.gamma == wanted.grouping.gamma < 1
    assert state.curve == wanted.curve
    waits = [group.every.tolist() for group in state.grouping.groups]
    assert waits == [group.every.tolist() for group in wanted.grouping.groups]
    assert {1, 3} == {rounds for group in waits for rounds in group}
