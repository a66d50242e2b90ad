"""Joins a run: turns an enrolment into a run in which this device is ready to work."""

import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from fleetune.edge_agent.personal.publishing import publisher_of
from fleetune.edge_agent.run.device import Device
from fleetune.edge_agent.run.first_ratio import first_ratio
from fleetune.edge_agent.run.growing_data import GrowingData
from fleetune.edge_agent.run.joined_run import JoinedRun
from fleetune.edge_agent.run.memory_room import check_unpacks
from fleetune.edge_agent.run.round_planner import RoundPlanner
from fleetune.edge_agent.run.round_sessions import RoundSessions
from fleetune.edge_agent.run.run_backend import backend_of
from fleetune.edge_agent.run.samples import FixedSamples, Samples
from fleetune.edge_agent.run.starting_model import deployed_weights
from fleetune.edge_agent.training.local_training import (
    LocalTrainer,
    single_sample_line,
    trains_on_single_samples,
)
from fleetune.edge_agent.training.trainers import Kind, needs_bundle
from fleetune.edge_agent.training.trusted_code import check_trust
from fleetune.protocols.conditions import Conditions
from fleetune.protocols.errors import PacketForeign
from fleetune.protocols.input_files import input_limits
from fleetune.protocols.methods import from_section
from fleetune.protocols.pages_on_disk import array_on_disk, release
from fleetune.protocols.wire.payloads import Enrolment, read_enrolment

log = logging.getLogger(__name__)


def join(
    device: Device,
    run: str,
    data: bytes,
    *,
    kind: Kind,
    stop: Callable[[], str | None],
    progress: Callable[[float], None],
) -> JoinedRun:
    """Make this device ready for a run. A known run continues where it stopped.

    Args:
        device: the device that joins.
        run: id of the run.
        data: the encoded `Enrolment`.
        kind: kind of the trainer; if it needs a bundle, the device's store has it.
        stop: called by local training before every batch, see `LocalTrainer`.
        progress: called by local training after every batch.

    Raises:
        PacketError: the enrolment or the bundle is damaged, or belongs to another run or model.
        DataError: the device's samples are missing or do not fit the model.
        ModelError: the model cannot be built here, or training diverges at once.
        SettingError: this agent does not know the method or the board, the method does not support the run's
            task, or the owner does not trust the run's code.
        StoreError: the stored state of this run is damaged.
        BackboneLacking: the frozen part of the run's model has to be fetched first.
    """
    settings, conditions = device.settings, device.meter.conditions()
    enrolment = _enrolment(data, run, conditions)
    del data  # up to a whole model
    check_trust(enrolment, settings.trusted, builds_model=not needs_bundle(kind))
    enrolment = replace(enrolment, weights=array_on_disk(enrolment.weights, device.store.folder))
    samples = _samples(device, enrolment)
    with input_limits(memory_bytes=conditions.memory_bytes, is_stopped=lambda: stop() is not None):
        own = samples.newest()
    method = from_section(enrolment.method, enrolment.spec, enrolment.learns.kind)
    backend = backend_of(device, enrolment, kind, conditions, stop)
    own = samples.as_trained(own, backend.vocabulary)
    num_samples, batch_size = own.size("train"), enrolment.training.batch_size
    if trains_on_single_samples(enrolment.spec, num_samples, batch_size):
        log.warning("%s", single_sample_line(f"{settings.device} has 1 training sample", batch_size))
    bare = LocalTrainer(backend, own.without_samples(), enrolment.training, stop, progress)
    sessions = RoundSessions(device, enrolment, method, samples, bare)
    trainer = sessions.trainer_of(own)
    session = sessions.of_trainer(trainer)
    controller = first_ratio(device, enrolment, trainer, kind, conditions)
    log.info("joined run %s with %d samples; %s", run, trainer.num_samples, controller.report.reason)
    samples.watch_loss(bare, partial(deployed_weights, device.store, enrolment))
    publisher = publisher_of(
        device.store, settings.device, settings.publish, settings.trusted, settings.publish_mode
    )
    joined = JoinedRun(
        enrolment,
        session,
        RoundPlanner(controller, compact=enrolment.compact is True),
        device.meter,
        device.store.ratio_controller(run),
        samples=samples,
        session_of_round=sessions.of_round,
        publish=publisher.refresh,
    )
    joined.keep()
    release(enrolment.weights)
    return joined


def _enrolment(data: bytes, run: str, conditions: Conditions) -> Enrolment:
    check_unpacks(data, "model", conditions)
    enrolment = read_enrolment(data)
    if enrolment.run != run:
        raise PacketForeign(f"the enrolment is of run {enrolment.run!r}, but was sent for run {run!r}")
    return enrolment


def _samples(device: Device, enrolment: Enrolment) -> Samples:
    if device.stream is None:
        return FixedSamples(device.settings, enrolment)
    return GrowingData(device.stream, enrolment, device.settings.test_fraction)
