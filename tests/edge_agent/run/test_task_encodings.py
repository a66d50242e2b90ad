"""A task may ask for another encoding of its update than the run's: what one leaves out another brings."""

import numpy as np
import pytest
from msgspec import UNSET
from tests.edge_agent.run.test_optimiser_state import SPEC, START, OneDevice

from fleetune.protocols.errors import PacketForeign
from fleetune.protocols.method.choice import Budget
from fleetune.protocols.method.method import Round
from fleetune.protocols.methods import create
from fleetune.protocols.settings.encoding import ValueEncodings
from fleetune.protocols.update import codec
from fleetune.protocols.update.reference_model import ReferenceModel
from fleetune.protocols.wire.payloads import Assignment, Reply, run_key

METHOD = create("fedavg", SPEC, {})
LOSSLESS, INT4, SPARSE = 0, 1, 2


def a_device(up="lossless", memory=None):
    asks = {"encoding": ValueEncodings(up, "raw"), "encodings": ("int4", {"name": "sparse", "density": 0.1})}
    return OneDevice("fedavg", memory, asks)


def told(device, number, uplink=UNSET, within=LOSSLESS):
    """What the coordinator reads of the update to round `number`, trained from the same weights as ever."""
    _, tasks = METHOD.plan(METHOD.init_coordinator(START), Round(number, ("d",)), run_key(0))
    task = codec.encode(Assignment("d", number, 1, False, tasks["d"], ratio=1.0, uplink=uplink), SPEC)
    data = device.session.reply(task, Budget(uplink=within))
    base = ReferenceModel.of_task(tasks["d"], SPEC)
    return codec.decode(data, Reply[METHOD.update_type], SPEC, reference=base).update.patch.values


def away(values, trained):
    return float(np.abs(values - trained).max())


@pytest.mark.parametrize("up", ["raw", "lossless"])
def test_what_a_thin_update_leaves_out_goes_along_with_the_next_one(up):
    device = a_device(up)
    trained = told(a_device(up), 1)
    thin = told(device, 1, SPARSE)
    residual = trained - thin
    assert away(thin, trained) > 1e-3
    assert np.array_equal(device.kept.slots["residual"][: residual.size], residual)
    restarted, alone = a_device(up, device.memory), a_device(up)
    told(alone, 1)
    assert away(told(restarted, 2), told(alone, 2) + residual) < 1e-6
    assert not np.any(restarted.kept.slots["residual"]), "nothing is left"


def test_another_lossy_encoding_goes_on_with_it():
    device = a_device()
    residual = told(a_device(), 1) - told(device, 1, SPARSE)
    alone = a_device()
    told(alone, 1)
    wanted = told(alone, 2) + residual
    assert away(told(device, 2, INT4) + device.kept.slots["residual"][: wanted.size], wanted) < 1e-6


def test_a_device_sends_no_more_than_it_affords():
    thin = told(a_device(), 1, INT4)
    assert np.array_equal(told(a_device(), 1, UNSET, within=INT4), thin)
    assert np.array_equal(told(a_device(), 1, INT4, within=LOSSLESS), thin)


def test_an_encoding_that_the_run_does_not_have_is_refused_and_nothing_changes():
    device = a_device()
    told(device, 1)
    before = device.memory.data
    with pytest.raises(PacketForeign, match="encoding 3, but the run has 3"):
        told(device, 2, 3)
    assert device.memory.data == before


def test_a_run_with_its_own_encoding_alone_keeps_no_more_than_ever():
    device = a_device("raw")
    told(device, 1)
    assert "residual" not in device.kept.slots


def test_a_device_says_what_the_encoding_that_it_was_asked_for_left_out():
    device, base = a_device(), START
    trained = told(a_device(), 1)
    thin = told(device, 1, SPARSE)
    there = slice(trained.size)
    share = np.linalg.norm(trained - thin) / np.linalg.norm(trained - base[there])
    assert device.session.done.compression_error == pytest.approx(share, rel=1e-4)
    assert 0 < share < 1
    told(device, 2, LOSSLESS)
    assert device.session.done.compression_error == 0, "what waited went along"


def test_it_says_nothing_where_it_was_asked_for_none_or_sent_less_than_asked():
    device = a_device("int4")
    told(device, 1)
    assert device.session.done.compression_error is None
    told(device, 2, INT4, within=SPARSE)
    assert device.session.done.compression_error is None
    told(device, 3, SPARSE)
    assert device.session.done.compression_error > 0
