"""Joining a run: from an enrolment to a session that is ready to work."""

import logging
import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from msgspec import UNSET, structs

from fleetune.edge_agent.budget.cost_forecast import capability_of
from fleetune.edge_agent.budget.cost_history import CostHistory
from fleetune.edge_agent.budget.ratio_controller import RatioController, read_ratio_controller
from fleetune.edge_agent.extensions.adoption.deployed_model import DeployedModel, read_deployed
from fleetune.edge_agent.extensions.adoption.serving import adoption_of
from fleetune.edge_agent.personal.publishing import publisher_of
from fleetune.edge_agent.probes.board_profile import board_named, report_of
from fleetune.edge_agent.probes.link_speed import LinkSpeed
from fleetune.edge_agent.probes.memory import process_memory
from fleetune.edge_agent.probes.training_speed import measure_training
from fleetune.edge_agent.run.device import Device, DeviceSettings
from fleetune.edge_agent.run.growing_data import GrowingData, with_known_ids
from fleetune.edge_agent.run.joined_run import JoinedRun
from fleetune.edge_agent.run.round_planner import RoundPlanner
from fleetune.edge_agent.run.session import Session
from fleetune.edge_agent.state.agent_store import AgentStore
from fleetune.edge_agent.state.deployed_files import DeployedFiles
from fleetune.edge_agent.state.frozen_tensors import frozen_tensors
from fleetune.edge_agent.training.backend import Backend
from fleetune.edge_agent.training.device_data import (
    DeviceData,
    check_fits,
    for_vocabulary,
    load,
    scaled,
    split,
)
from fleetune.edge_agent.training.feature_data import features_of, fits, upper_of
from fleetune.edge_agent.training.local_training import LocalTrainer
from fleetune.edge_agent.training.single_sample import has_single_batches, resting_norms, resting_words
from fleetune.edge_agent.training.step_guard import StepGuard
from fleetune.edge_agent.training.trainers import Kind, check_room, make_backend, needs_bundle
from fleetune.edge_agent.training.trusted_code import check_trust
from fleetune.protocols.bundle.bundle import read_bundle
from fleetune.protocols.conditions import Conditions
from fleetune.protocols.errors import (
    ModelError,
    PacketError,
    PacketForeign,
    PacketVersion,
    StoreError,
    StoreVersion,
)
from fleetune.protocols.input_files import input_limits
from fleetune.protocols.method import steps
from fleetune.protocols.method.choice import DeviceReport, as_encoded, values_of
from fleetune.protocols.method.method import Method
from fleetune.protocols.methods import from_section
from fleetune.protocols.model.backbone_file import held_bytes
from fleetune.protocols.model.carried_layers import carry_over
from fleetune.protocols.model.spec import FlatArray
from fleetune.protocols.update import codec
from fleetune.protocols.wire.messages import TransferKey
from fleetune.protocols.wire.payloads import Enrolment, read_enrolment

CALIBRATION_S = 0.5
LONGEST_STEP_S = 60.0  # at least; a step longer than the round is of no use
COPIES = 3  # of a payload that is being unpacked: packed, unpacked, and as arrays

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
    """Make ready for a run.

    Args:
        device: that joins; a run it knows already goes on where it stopped.
        run: its id.
        data: the encoded `Enrolment`.
        kind: what trains here; a bundle that it needs is in the device's store.
        stop: asked by local training before every batch, see `LocalTrainer`.
        progress: told by it after every batch.

    Raises:
        PacketError: the enrolment is damaged, or of another run; the bundle is damaged, or of another model.
        DataError: the device's samples are missing or do not fit the model.
        ModelError: the model cannot be built here, or training diverges at once.
        SettingError: a method or board that this agent does not know, a method that is not for the run's
            task, or code its owner does not trust.
        StoreError: what the device knows of this run is damaged.
        BackboneLacking: what is frozen in its model has to be asked for first.
    """
    settings, store = device.settings, device.store
    conditions = device.meter.conditions()
    enrolment = _read(data, run, conditions)
    check_trust(enrolment, settings.trusted, builds_model=not needs_bundle(kind))
    growing = _growing(device, enrolment)
    with input_limits(memory_bytes=conditions.memory_bytes, is_stopped=lambda: stop() is not None):
        own = _own_data(settings, enrolment) if growing is None else growing.newest()
    method = from_section(enrolment.method, enrolment.spec, enrolment.learns.kind)
    backend = _backend(device, enrolment, kind, conditions, stop)
    if growing is not None:
        own = with_known_ids(own, backend.vocabulary)
    own = for_vocabulary(own, backend.vocabulary)
    _say_if_norms_rest(settings.device, backend, own.size("train"), enrolment.training.batch_size)
    with_features = _features_where_they_fit(device, backend, enrolment, stop)
    trainer = LocalTrainer(*with_features(own), enrolment.training, stop, progress)
    session = _session(enrolment, method, trainer, store, settings.device)
    memory = store.ratio_controller(run)
    before = _known_before(store, enrolment, kind, settings.train_on)
    cost_history = before.cost_history if before and _trains_as(before, kind, settings.train_on) else None
    link = device.measure_link() if before is None else _link_before(before)
    if link.unknown:
        log.warning("the link's speed is not known: %s", link.unknown)
    report = _report(settings, enrolment, own, link)
    ratio_controller = _ratio_controller(
        settings, enrolment, method, trainer, kind, report, link, cost_history or CostHistory(), conditions
    )
    log.info("joined run %s with %d samples; %s", run, report.num_samples, ratio_controller.report.reason)
    of_round = None
    if growing is not None:
        bare = replace(trainer, backend=backend, data=own.without_samples())
        growing.watch_loss(bare, partial(_served_weights, store, enrolment))
        of_round = partial(
            _session_with, growing, with_features, enrolment, method, bare, store, settings.device
        )
    publisher = publisher_of(
        store, settings.device, settings.publish, settings.trusted, settings.publish_mode
    )
    member, meter = RoundPlanner(ratio_controller, compact=enrolment.compact is True), device.meter
    joined = JoinedRun(
        enrolment,
        session,
        member,
        meter,
        memory,
        growing=growing,
        of_round=of_round,
        publish=publisher.refresh,
    )
    joined.keep()
    return joined


def _say_if_norms_rest(device: str, backend: Backend, num_samples: int, batch_size: int) -> None:
    """Raises ModelError: the backend cannot train on the single samples that this device's batches have."""
    if has_single_batches(backend.spec, num_samples, batch_size):
        who = f"{device} has {num_samples} training sample{'s' * (num_samples > 1)}"
        if line := resting_words(who, resting_norms(backend), batch_size):
            log.warning("%s", line)


def _read(data: bytes, run: str, conditions: Conditions) -> Enrolment:
    _check_fits(data, "model", conditions)
    enrolment = read_enrolment(data)
    if enrolment.run != run:
        raise PacketForeign(f"enrolment of run {enrolment.run!r} came as one of run {run!r}")
    return enrolment


def _check_fits(data: bytes, what: str, conditions: Conditions) -> None:
    """Raises ModelError when a payload is too large for this board's memory, before it is unpacked."""
    _check_holds(COPIES * codec.unpacked_bytes(data), conditions, f"{what} takes {{}} to unpack")


def _check_holds(needed: int, conditions: Conditions, what: str = "frozen part takes {}") -> None:
    """Raises ModelError when this board's memory cannot hold so many bytes more."""
    usable, held = conditions.memory_bytes, process_memory().resident
    if usable is not None and held is not None and held + needed > usable:
        raise ModelError(
            f"the run's {what.format(f'{needed / 1e6:.0f} MB')} beside the {held / 1e6:.0f} MB held"
            f" already, and this process may take {usable / 1e6:.0f} MB"
        )


def _own_data(settings: DeviceSettings, enrolment: Enrolment) -> DeviceData:
    own = split(load(settings.data, None), settings.test_fraction, enrolment.validation_fraction)
    return scaled(
        check_fits(own, enrolment.spec, enrolment.learns), enrolment.mean, enrolment.std, enrolment.spec
    )


def _growing(device: Device, enrolment: Enrolment) -> GrowingData | None:
    if device.stream is None:
        return None
    return GrowingData(device.stream, enrolment, device.settings.test_fraction)


def _report(settings: DeviceSettings, enrolment: Enrolment, own: DeviceData, link: LinkSpeed) -> DeviceReport:
    """What the board's profile says, and what the link showed."""
    return report_of(
        settings.device,
        board_named(settings.board),
        num_samples=own.size("train"),
        flops_per_sample=enrolment.flops_per_sample,
        uplink_bps=link.uplink_bps,
        downlink_bps=link.downlink_bps,
    )


def _ratio_controller(
    settings: DeviceSettings,
    enrolment: Enrolment,
    method: Method[Any, Any, Any, Any],
    trainer: LocalTrainer,
    kind: Kind,
    report: DeviceReport,
    link: LinkSpeed,
    cost_history: CostHistory,
    conditions: Conditions,
) -> RatioController:
    """Choose twice: what fits in memory is trained for a moment, and then its speed is known."""
    board = board_named(settings.board)
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
    capability = replace(capability, train_on=settings.train_on)
    ratio_controller = RatioController(
        as_encoded(steps.choices(method, report), enrolment.uplinks, enrolment.downlink, enrolment.spec.size),
        capability,
        board,
        settings.policy,
        enrolment.deadline_s,
        report,
        cost_history=cost_history,
        proposed=enrolment.proposes is True,
        least_work=enrolment.least_local_work,
        most_work=enrolment.most_local_work,
        late=None if enrolment.late is UNSET else enrolment.late,
        values=values_of(enrolment.uplinks),
    )
    if not structs.replace(ratio_controller, deadline_s=math.inf).chosen(conditions).fits:
        return ratio_controller.chosen(conditions)
    speed = _speed(trainer, enrolment)
    known = structs.replace(
        ratio_controller,
        capability=replace(capability, samples_per_s=speed),
        report=replace(report, samples_per_s=speed),
    )
    return known.chosen(conditions)


def _known_before(
    store: AgentStore, enrolment: Enrolment, kind: Kind, train_on: str
) -> RatioController | None:
    """Of this run before a restart; or of the latest run of the same model and trainer."""
    known = read_ratio_controller(store.ratio_controller(enrolment.run).read())
    if known is not None:
        return known
    for run in store.runs():
        found = read_ratio_controller(store.ratio_controller(run).read())
        if found and _trains_as(found, kind, train_on) and _is_model(store, run, enrolment):
            log.info("what rounds of run %s taught holds here too: the same model, the same trainer", run)
            return found
    return None


def _is_model(store: AgentStore, run: str, enrolment: Enrolment) -> bool:
    try:
        codec.check_model(store.enrolment(run).read() or b"", enrolment.spec)
    except PacketError:
        return False
    return True


def _trains_as(before: RatioController, kind: Kind, train_on: str) -> bool:
    """Whether its costs are today's: another trainer takes other times and another amount of memory."""
    return (before.capability.trainer, before.capability.train_on) == (kind, train_on)


def _link_before(before: RatioController) -> LinkSpeed:
    """As it was known before a restart: a thin link has better things to carry than another probe."""
    known = before.capability
    return LinkSpeed(known.uplink_bps, known.downlink_bps, known.latency_s)


def _speed(trainer: LocalTrainer, enrolment: Enrolment) -> float:
    """Samples a second, by a few real steps on the device's own samples."""
    (speed,) = measure_training(
        trainer.backend,
        trainer.data,
        trainer.settings,
        enrolment.weights,
        seconds=CALIBRATION_S,
        stop=trainer.stop,
    )
    return speed.samples_per_s


def _session(
    enrolment: Enrolment,
    method: Method[Any, Any, Any, Any],
    trainer: LocalTrainer,
    store: AgentStore,
    device: str,
) -> Session:
    """Go on with what the device has of this run, or begin; it is never begun anew over something damaged."""
    memory, own = store.session(enrolment.run), partial(_own_model, store, enrolment)
    adoption = adoption_of(DeployedFiles.beside(store.served), enrolment, trainer)
    try:
        return Session(enrolment, device, method, trainer, memory, adoption=adoption, own=own)
    except PacketVersion as problem:
        raise StoreVersion(f"{memory.path}: {problem}") from None
    except PacketError as problem:
        raise StoreError(
            f"{memory.path} is damaged ({problem}); restore it, or remove it to start from the common model"
        ) from None


def _session_with(
    growing: GrowingData,
    with_features: Callable[[DeviceData], tuple[Backend, DeviceData]],
    enrolment: Enrolment,
    method: Method[Any, Any, Any, Any],
    trainer: LocalTrainer,
    store: AgentStore,
    device: str,
    key: TransferKey,
) -> Session:
    """A session as after a restart, with the samples of a round: what was kept, judged on those."""
    vocabulary = trainer.backend.vocabulary
    data = for_vocabulary(with_known_ids(growing.of_round(key), vocabulary), vocabulary)
    growing.note_round(replace(trainer, data=data))
    backend, data = with_features(data)
    return _session(enrolment, method, replace(trainer, backend=backend, data=data), store, device)


def _served_weights(store: AgentStore, enrolment: Enrolment) -> FlatArray | None:
    """The model that the device serves; None: it is of another kind than the run's."""
    served = read_deployed(store.served.read())
    return None if served is None or served.record.model != enrolment.spec.hash else served.weights


def _features_where_they_fit(
    device: Device, backend: Backend, enrolment: Enrolment, stop: Callable[[], str | None]
) -> Callable[[DeviceData], tuple[Backend, DeviceData]]:
    """What makes, of a device's samples, what it trains with: where there is room, the model's upper part and
    the features below it.
    """
    upper = upper_of(backend, enrolment.training)

    def made(data: DeviceData) -> tuple[Backend, DeviceData]:
        if upper is None or not fits(upper, data, _room(device.meter.conditions())):
            return backend, data
        return upper.backend, features_of(upper, data, stop)

    return made


def _own_model(store: AgentStore, enrolment: Enrolment) -> FlatArray | None:
    """The served model, where the run goes on from one in which this device took part; of another version of
    the model, the layers that this one keeps.
    """
    before, served = enrolment.continues, read_deployed(store.served.read())
    if before is None or served is None:
        return None
    if served.record.run != before and store.session(before).read() is None:
        return None
    weights, words = _kept_by(enrolment, served, store.enrolment(served.record.run).read())
    if weights is not None:
        log.info("goes on from run %s with this device's own model%s: %s", before, words, served.record.words)
    return weights


def _kept_by(enrolment: Enrolment, served: DeployedModel, data: bytes | None) -> tuple[FlatArray | None, str]:
    """What a run's model keeps of a served one, and that in words; `data`: the enrolment that one is from."""
    if served.record.model == enrolment.spec.hash:
        return served.weights, ""
    if data is None or (before := read_enrolment(data).spec).hash != served.record.model:
        return None, ""
    found = carry_over(before, served.weights, enrolment.spec, enrolment.weights)
    return (found.weights, f", {found.words}") if found.kept else (None, "")


def _backend(
    device: Device,
    enrolment: Enrolment,
    kind: Kind,
    conditions: Conditions,
    stop: Callable[[], str | None],
) -> Backend:
    spec, store = enrolment.spec, device.store
    guard = StepGuard(stop, max(LONGEST_STEP_S, enrolment.deadline_s))
    _check_holds(held_bytes(spec, as_kept=kind == "onnx"), conditions)
    frozen = frozen_tensors(store, enrolment)
    check_room(kind, conditions.memory_bytes, process_memory().resident or 0)
    bundle = store.bundle(enrolment.run)
    if bundle is not None:
        _check_fits(bundle, "bundle", conditions)
    read = None if bundle is None else read_bundle(bundle, spec)
    task, room = enrolment.learns, _room(conditions)
    threads, on = device.settings.threads, device.settings.train_on
    return make_backend(
        kind, spec, read, threads, task=task, frozen=frozen, guard=guard, room=room, device=on
    )


def _room(conditions: Conditions) -> int | None:
    """Bytes that this process may still take; None: not known."""
    usable, held = conditions.memory_bytes, process_memory().resident
    return None if usable is None or held is None else max(0, usable - held)
