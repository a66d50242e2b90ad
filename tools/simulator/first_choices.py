"""Computes the options that simulated devices choose before the first round, from board and link."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from msgspec import UNSET, structs

from fleetune.edge_agent.budget.cost_forecast import capability_of
from fleetune.edge_agent.budget.owner_policy import Policy
from fleetune.edge_agent.budget.ratio_controller import RatioController
from fleetune.edge_agent.probes.board_profile import report_of
from fleetune.edge_agent.training.trainers import Kind
from fleetune.protocols.conditions import Conditions
from fleetune.protocols.method import steps
from fleetune.protocols.method.choice import value_byte_shares, with_encodings
from fleetune.protocols.method.method import Method
from fleetune.protocols.wire.payloads import Enrolment
from fleetune.tools.simulator.device_specs import DeviceSpec
from fleetune.tools.simulator.partitioned_data import SampleCounts

# The trainer and the memory of an agent that has joined a run and not trained yet (measured on x86-64 with
# LeNet-5; 260 MB with torch). The simulation computes with torch, but it models boards, on which
# `--trainer auto` prefers ONNX Runtime.
AGENT_TRAINER: Kind = "onnx"
AGENT_BYTES = 71_000_000

FirstChoice = Callable[[Conditions], RatioController]


@dataclass(frozen=True)
class FirstChoices:
    """The ratio and encodings that each simulated device chooses before its first round.

    Devices with equal board, link and samples share one computation.

    Attributes:
        enrolment: enrolment of the run.
        method: method of the run.
        policy: the owner's limits for the devices.
    """

    enrolment: Enrolment
    method: Method[Any, Any, Any, Any]
    policy: Policy
    _made: dict[tuple[Any, ...], RatioController] = field(default_factory=dict)

    def of(self, device: DeviceSpec, sizes: SampleCounts) -> FirstChoice:
        """Return a function from conditions to the choice of a device with these sample counts."""
        return partial(self._chosen, device, sizes)

    def _chosen(self, device: DeviceSpec, sizes: SampleCounts, conditions: Conditions) -> RatioController:
        link = device.link
        rates = link.rate_bps(0, "up"), link.rate_bps(0, "down"), link.delay_s
        alike = device.board, device.ratio, rates, sizes, conditions
        if alike not in self._made:
            first = ratio_controller_of(device, self.enrolment, self.method, sizes, self.policy)
            self._made[alike] = first.chosen(conditions)
        found = self._made[alike]
        return structs.replace(found, report=replace(found.report, device=device.name))


def ratio_controller_of(
    device: DeviceSpec,
    enrolment: Enrolment,
    method: Method[Any, Any, Any, Any],
    sizes: SampleCounts,
    policy: Policy,
) -> RatioController:
    """Return the device's possible options, from its board and link at the start; none is chosen yet."""
    link, board = device.link, device.board
    report = report_of(
        device.name,
        board,
        num_samples=sizes.train,
        flops_per_sample=enrolment.flops_per_sample,
        uplink_bps=link.rate_bps(0, "up") or board.uplink_bps,
        downlink_bps=link.rate_bps(0, "down") or board.downlink_bps,
    )
    capability = capability_of(
        report,
        board,
        enrolment,
        trainer=AGENT_TRAINER,
        num_test=sizes.test,
        num_validation=sizes.validation,
        latency_s=2 * link.delay_s,
        base_bytes=AGENT_BYTES,
    )
    fixed = device.ratio is not None
    return RatioController(
        with_encodings(
            steps.choices(method, report), enrolment.uplinks, enrolment.downlink, enrolment.spec.size
        ),
        capability,
        board,
        Policy(ratio=device.ratio) if fixed else policy,
        None if fixed else enrolment.deadline_s,
        report,
        proposed=enrolment.proposes is True,
        least_work=enrolment.least_local_work,
        most_work=enrolment.most_local_work,
        late=None if enrolment.late is UNSET else enrolment.late,
        values=value_byte_shares(enrolment.uplinks),
    )
