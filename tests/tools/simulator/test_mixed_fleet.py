"""The mixed fleets of examples/: with each paper's method every board finds a ratio that fits."""

from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
from msgspec.structs import replace as replace_struct

from fleetune.coordinator.run.enrolment import prepare
from fleetune.edge_agent.budget.owner_policy import Policy
from fleetune.protocols.methods import from_section, with_defaults_of_run
from fleetune.protocols.settings.run_settings import RunSettings
from fleetune.protocols.settings.run_toml import read_run
from fleetune.protocols.wire.payloads import Enrolment
from fleetune.tools.compare.configurations import configurations_of, varied
from fleetune.tools.simulator.device_specs import device_specs
from fleetune.tools.simulator.first_choices import FirstChoices, ratio_controller_of
from fleetune.tools.simulator.partitioned_data import SampleCounts
from fleetune.tools.simulator.simulated_device import SimulatedDevice

EXAMPLES = Path(__file__).parents[3] / "examples"
CHOSEN = ("chosen", "srp", "kapc", "bls", "purin", "dcpfl")  # of [compare], ratios as devices choose them


# how many samples a device has, as the examples deal them
FLEETS = {
    "mixed-fleet": ((1, 28, 28), 10, SampleCounts(70, 0, 30)),
    "mixed-fleet-har": ((9, 128), 6, SampleCounts(158, 0, 68)),  # the most of any, of the seed in the file
}


@cache
def run_of(example: str) -> tuple[RunSettings, Enrolment]:
    shape, classes, _ = FLEETS[example]
    settings = read_run(EXAMPLES / f"{example}.toml")
    model = replace_struct(settings.model, input_shape=shape, num_classes=classes)
    settings = replace_struct(settings, model=model)
    return settings, prepare(settings)


@pytest.mark.parametrize("label", CHOSEN)
@pytest.mark.parametrize("example", FLEETS)
def test_every_board_is_served_by_every_paper_s_method(example, label):
    settings, enrolment = run_of(example)
    (contender,) = configurations_of(settings, [label])
    section = with_defaults_of_run(contender.method, settings.run.rounds)
    enrolment = replace(enrolment, method=section)
    method, sizes = from_section(section, enrolment.spec), FLEETS[example][2]
    fleet = varied(settings, contender).fleet
    first_choices, refusals, ratios = FirstChoices(enrolment, method, Policy()), {}, set()
    for device in device_specs(fleet, settings.run.seed):
        controller = ratio_controller_of(device, enrolment, method, sizes, Policy())
        player = SimulatedDevice.of(
            device, first_choices.of(device, sizes), Policy(), enrolment.flops_per_sample
        )
        chosen = player.planner.ratio_controller
        assert chosen == controller.chosen(player.conditions), "as if it had chosen for itself"
        ratios.add(chosen.report.ratio)
        if not chosen.fits:
            refusals[device.name, device.board.name] = chosen.report.reason
    assert refusals == {}
    assert len(ratios) > 1  # they differ with board and link
