"""Chooses the first ratio in a run from the board's profile, the link, past rounds, and a training test."""

import logging
import math
from dataclasses import replace

from msgspec import UNSET, structs

from fleetune.edge_agent.budget.cost_forecast import capability_of
from fleetune.edge_agent.budget.cost_history import CostHistory
from fleetune.edge_agent.budget.ratio_controller import RatioController, read_ratio_controller
from fleetune.edge_agent.probes.board_profile import board_named, report_of
from fleetune.edge_agent.probes.link_speed import LinkSpeed
from fleetune.edge_agent.probes.memory import process_memory
from fleetune.edge_agent.probes.training_speed import measure_training
from fleetune.edge_agent.run.device import Device
from fleetune.edge_agent.state.agent_store import AgentStore
from fleetune.edge_agent.training.local_training import LocalTrainer
from fleetune.edge_agent.training.trainers import Kind
from fleetune.protocols.conditions import Conditions
from fleetune.protocols.errors import PacketError
from fleetune.protocols.method import steps
from fleetune.protocols.method.choice import value_byte_shares, with_encodings
from fleetune.protocols.methods import from_section
from fleetune.protocols.update import codec
from fleetune.protocols.wire.payloads import Enrolment

CALIBRATION_S = 0.5

log = logging.getLogger(__name__)


def first_ratio(
    device: Device, enrolment: Enrolment, trainer: LocalTrainer, kind: Kind, conditions: Conditions
) -> RatioController:
    """Return a ratio controller that has chosen its first ratio.

    It chooses twice. The first choice uses the profile's speed and finds a ratio that fits in memory. A few
    training steps then measure the real speed for the second choice.

    Args:
        device: the device that joins.
        enrolment: enrolment of the run.
        trainer: trainer with the device's samples.
        kind: kind of the trainer.
        conditions: current state of the board.
    """
    settings, known = device.settings, _known_before(device, enrolment, kind)
    past = known.cost_history if known and _trains_alike(known, kind, settings.train_on) else CostHistory()
    link = device.measure_link() if known is None else _link_before(known)
    if link.unknown:
        log.warning("the speed of the link to the broker is unknown: %s", link.unknown)
    controller = _unmeasured(device, enrolment, trainer, kind, link, past)
    if not structs.replace(controller, deadline_s=math.inf).chosen(conditions).fits:
        return controller.chosen(conditions)
    speed = _samples_per_s(trainer, enrolment)
    measured = structs.replace(
        controller,
        capability=replace(controller.capability, samples_per_s=speed),
        report=replace(controller.report, samples_per_s=speed),
    )
    return measured.chosen(conditions)


def _unmeasured(
    device: Device,
    enrolment: Enrolment,
    trainer: LocalTrainer,
    kind: Kind,
    link: LinkSpeed,
    past: CostHistory,
) -> RatioController:
    """Return a controller that uses the speed in the board's profile."""
    settings, board = device.settings, board_named(device.settings.board)
    method = from_section(enrolment.method, enrolment.spec, enrolment.learns.kind)
    report = report_of(
        settings.device,
        board,
        num_samples=trainer.num_samples,
        flops_per_sample=enrolment.flops_per_sample,
        uplink_bps=link.uplink_bps,
        downlink_bps=link.downlink_bps,
    )
    capability = capability_of(
        report,
        board,
        enrolment,
        trainer=kind,
        num_test=trainer.num_test,
        num_validation=trainer.data.size("validation"),
        latency_s=link.round_trip_s,
        base_bytes=process_memory().resident,
    )
    return RatioController(
        with_encodings(
            steps.choices(method, report), enrolment.uplinks, enrolment.downlink, enrolment.spec.size
        ),
        replace(capability, train_on=settings.train_on),
        board,
        settings.policy,
        enrolment.deadline_s,
        report,
        cost_history=past,
        proposed=enrolment.proposes is True,
        least_work=enrolment.least_local_work,
        most_work=enrolment.most_local_work,
        late=None if enrolment.late is UNSET else enrolment.late,
        values=value_byte_shares(enrolment.uplinks),
    )


def _known_before(device: Device, enrolment: Enrolment, kind: Kind) -> RatioController | None:
    """Return the stored controller of this run, or else of the latest run with the same model and trainer."""
    store = device.store
    known = read_ratio_controller(store.ratio_controller(enrolment.run).read())
    if known is not None:
        return known
    for run in store.runs():
        found = read_ratio_controller(store.ratio_controller(run).read())
        if (
            found
            and _trains_alike(found, kind, device.settings.train_on)
            and _is_of_model(store, run, enrolment)
        ):
            log.info("using the costs of rounds in run %s, which has the same model and trainer", run)
            return found
    return None


def _is_of_model(store: AgentStore, run: str, enrolment: Enrolment) -> bool:
    try:
        codec.check_model(store.enrolment(run).read() or b"", enrolment.spec)
    except PacketError:
        return False
    return True


def _trains_alike(before: RatioController, kind: Kind, train_on: str) -> bool:
    """True if the stored costs still apply; another trainer or device has other times and memory."""
    return (before.capability.trainer, before.capability.train_on) == (kind, train_on)


def _link_before(before: RatioController) -> LinkSpeed:
    """Return the link speed known before a restart, so that a slow link is not measured again."""
    link = before.capability.link
    return LinkSpeed(link.uplink_bps, link.downlink_bps, link.latency_s)


def _samples_per_s(trainer: LocalTrainer, enrolment: Enrolment) -> float:
    """Return the training speed, measured with a few real steps on the device's own samples."""
    (speed,) = measure_training(
        trainer.backend,
        trainer.data,
        trainer.settings,
        enrolment.weights,
        seconds=CALIBRATION_S,
        stop=trainer.stop,
    )
    return speed.samples_per_s
