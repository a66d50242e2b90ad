"""How much local training a task asks for is done, told and learned from."""

import pytest
from msgspec import UNSET
from tests.edge_agent.run.test_optimiser_state import SPEC, START, OneDevice

from fleetune.protocols.method.choice import Budget
from fleetune.protocols.method.method import Round
from fleetune.protocols.methods import create
from fleetune.protocols.update import codec
from fleetune.protocols.wire.payloads import Assignment, Reply, run_key


def done(name, asked, able=4.0, settings=None, **training):
    """What the reply tells of its local training, and the session; of two epochs of five batches."""
    device = OneDevice(name, **training)
    method = create(name, SPEC, settings or {})
    _, tasks = method.plan(method.init_coordinator(START), Round(1, ("d",)), run_key(0))
    task = Assignment("d", 1, 1, False, tasks["d"], ratio=1.0, local_work=asked)
    reply = device.session.reply(codec.encode(task, SPEC), Budget(1.0, able))
    told = codec.decode(reply, Reply[method.update_type], SPEC).measures.local_work
    return told, device.session.done.local_work


@pytest.mark.parametrize(("asked", "did"), [(0.25, 0.2), (0.5, 0.5), (2.0, 2.0), (4.0, 4.0)])
def test_less_and_more_than_once_is_told_as_it_was_done(asked, did):
    assert done("fedavg", asked) == (did, did)


def test_once_goes_without_saying():
    assert done("fedavg", UNSET) == (UNSET, 1.0)
    assert done("fedavg", 4.0, able=1.0) == (UNSET, 1.0), "no more than the device affords"


def test_epochs_of_a_methods_own_are_not_the_runs():
    """Ditto's epochs of the personal model are done whatever is asked; the shared model's are the run's."""
    assert done("ditto", 4.0, settings={"personal_epochs": 1}) == (4.0, 4.0)
