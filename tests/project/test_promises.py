"""What a run.toml says holds in a simulation and on a real fleet, or `serve` names it."""

import io
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console

from fleetune.coordinator.serving.console_output import print_start
from fleetune.edge_agent.budget.owner_policy import Policy
from fleetune.protocols.errors import PacketCorrupt
from fleetune.protocols.settings.run_settings import simulated_keys
from fleetune.protocols.settings.run_toml import parse_run
from fleetune.protocols.settings.simulation import FleetSection
from fleetune.protocols.wire import messages as wire
from fleetune.protocols.wire.messages import TransferKey
from fleetune.protocols.wire.outbox import Outbox
from fleetune.tools.simulator.device_specs import device_specs

SECTIONS = {
    "run": {"name": "r"},
    "model": {"name": "mlp", "input_shape": [1, 8, 8], "num_classes": 10},
    "method": {"name": "fedspu"},
}


def settings_of(**sections):
    return parse_run({**SECTIONS, **sections})


@pytest.mark.parametrize("devices", [1, 3, 10, 11, 101])
def test_a_simulated_device_is_dealt_the_ratio_of_its_name(devices):
    fleet = settings_of(fleet={"devices": devices, "ratios": [0.2, 0.6, 1.0]})
    ratios = [device.ratio for device in device_specs(fleet.fleet, fleet.run.seed)]
    assert ratios == [(0.2, 0.6, 1.0)[turn % 3] for turn in range(devices)]
    assert [
        fleet.fleet.assigned_ratio(device.name) for device in device_specs(fleet.fleet, fleet.run.seed)
    ] == ratios


def test_any_name_is_dealt_the_same_ratio_at_every_start():
    fleet = FleetSection(ratios=(0.2, 0.4, 0.6, 0.8, 1.0))
    assert [fleet.assigned_ratio(name) for name in ("pi-1", "pi-2", "gate7")] == [0.4, 0.6, 0.6]
    names = ["kitchen", "roof", "x", "0" * 64, "9" * 64, "٣"]
    assert [fleet.assigned_ratio(name) for name in names] == [fleet.assigned_ratio(name) for name in names]
    assert {fleet.assigned_ratio(f"{chr(97 + n)}-cam") for n in range(26)} == set(fleet.ratios)
    assert FleetSection().assigned_ratio("device-0") is None


@pytest.mark.parametrize(
    ("own", "assigned_ratio", "wanted"),
    [(None, None, None), (0.5, None, 0.5), (None, 0.4, 0.4), (0.5, 0.4, 0.4)],
)
def test_the_smaller_of_the_owners_ratio_and_the_dealt_one_holds(own, assigned_ratio, wanted):
    policy = Policy(ratio=own, nice=3).at_most(assigned_ratio)
    assert (policy.ratio, policy.nice) == (wanted, 3)
    assert Policy(ratio=0.2).at_most(0.4).ratio == 0.2


def test_a_dealt_ratio_travels_with_every_offer_and_changes_no_byte_of_the_payload():
    plain, with_ratio = Outbox("d"), Outbox("d")
    (without,) = plain.post(TransferKey("enrolment", "r"), b"weights", 0)
    (offer,) = with_ratio.post(TransferKey("enrolment", "r"), b"weights", 0, ratio=0.4)
    assert (offer.ratio, offer.transfer, offer.digest) == (0.4, without.transfer, without.digest)
    assert wire.read_to_device(wire.encode(offer)) == offer
    assert b"ratio" not in wire.encode(without)  # an agent of before reads it
    assert [again.ratio for again in with_ratio.reconnected(1)] == [0.4]
    for wrong in (b"0", b"-1", b"1.5", b"1e999", b'"x"'):
        with pytest.raises(PacketCorrupt):
            wire.read_to_device(wire.encode(offer).replace(b"0.4", wrong))


def test_what_only_a_simulation_heeds_is_named():
    assert simulated_keys(settings_of()) == []
    assert simulated_keys(settings_of(fleet={"ratios": [0.2]}, round={"deadline_s": 5})) == []
    found = simulated_keys(
        settings_of(
            fleet={"devices": 3, "boards": {"phone-low": 2}, "ratios": [0.2], "batteries": [0.1, 0.9]},
            data={"partition": {"alpha": 0.1}},
        )
    )
    assert found == ["fleet.devices", "fleet.boards", "fleet.batteries", "data.partition"]


def test_serve_names_what_it_does_not_heed():
    console = Console(width=60, file=io.StringIO())
    run = SimpleNamespace(
        settings=settings_of(fleet={"uplink_mbps": 3.0}),
        enrolment=SimpleNamespace(run="r-1", spec=SimpleNamespace(num_parameters=1)),
        controller=SimpleNamespace(records=list),
        resumed=False,
        folder=Path("runs/r"),
    )
    print_start(run, "r", console)
    assert "ignored, because only simulations use them: fleet.uplink_mbps\n" in console.file.getvalue()
