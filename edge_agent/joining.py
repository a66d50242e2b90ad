"""Joining a run: from an enrolment to a session that is ready to work."""

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from edge_agent.budget import decide
from edge_agent.data import DeviceData, check_fits, load, split
from edge_agent.fit import LocalTrainer
from edge_agent.profile import board_named, report_of
from edge_agent.session import Session
from edge_agent.store import AgentStore, FileMemory
from edge_agent.trainer import Backend
from protocols import codec
from protocols.errors import (
    ModelError,
    PacketCorrupt,
    PacketError,
    PacketForeign,
    SettingError,
    StoreError,
)
from protocols.method import Budget, DeviceReport, Method
from protocols.methods import create
from protocols.model import ModelSpec
from protocols.payloads import Enrolment, run_key

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class DeviceSettings:
    """What the owner of a device decides.

    Attributes:
        fleet, device: names.
        data: source of the device's own samples, see `edge_agent.data.load`.
        state: folder of the agent's state.
        board: firmware profile.
        ratio: share of the model it wishes to train and send; None: its board's usual one.
        test_fraction: of its samples, held out as its own test split when the source marks none.
        threads: processor threads of training.
        trusted: modules of the owner's own whose code a run may name (`package.module`).
    """

    fleet: str
    device: str
    data: str
    state: Path
    board: str = "generic"
    ratio: float | None = None
    test_fraction: float = 0.3
    threads: int = 1
    trusted: tuple[str, ...] = ()


@dataclass(frozen=True)
class Participation:
    """A run this device takes part in."""

    enrolment: Enrolment
    session: Session
    report: DeviceReport


def join(
    settings: DeviceSettings,
    store: AgentStore,
    run: str,
    data: bytes,
    *,
    stop: Callable[[], str | None],
    progress: Callable[[float], None],
) -> Participation:
    """Make ready for a run.

    Args:
        settings: of this device.
        store: its state; a run it knows already goes on where it stopped.
        run: its id.
        data: the encoded `Enrolment`.
        stop: asked by local training before every batch, see `LocalTrainer`.
        progress: told by it after every batch.

    Raises:
        PacketError: the enrolment is damaged, or of another run.
        DataError: the device's samples are missing or do not fit the model.
        ModelError: the model cannot be built here, or the deadline cannot be met at any ratio.
        SettingError: a method or board that this agent does not know, or code its owner does not trust.
        StoreError: what the device knows of this run is damaged.
    """
    enrolment = _read(data, run)
    _check_trust(enrolment, settings.trusted)
    own = _own_data(settings, enrolment)
    method = _method_of(enrolment)
    report = _choose(settings, enrolment, method, own.size("train"))
    backend = _backend(enrolment.spec, settings.threads)
    trainer = LocalTrainer(backend, own, enrolment.training, stop, progress)
    session = _session(enrolment, method, trainer, store.session(enrolment.run), report)
    log.info("joined run %s with %d samples; %s", enrolment.run, report.num_samples, report.reason)
    return Participation(enrolment, session, report)


def _read(data: bytes, run: str) -> Enrolment:
    enrolment = codec.decode(data, Enrolment, None)
    if enrolment.run != run:
        raise PacketForeign(f"enrolment of run {enrolment.run!r} came as one of run {run!r}")
    if enrolment.weights.shape != (enrolment.spec.size,) or enrolment.weights.dtype != np.float32:
        raise PacketCorrupt(f"enrolment of run {run}: the initial weights do not fit the model")
    return enrolment


def _check_trust(enrolment: Enrolment, trusted: tuple[str, ...]) -> None:
    """A coordinator must not make a device import whatever it likes."""
    for named in (enrolment.spec.name, str(enrolment.method.get("name"))):
        module, separator, _ = named.partition(":")
        if separator and module not in trusted:
            raise SettingError(f"the run wants {named!r} imported here; --trust {module} allows it")


def _own_data(settings: DeviceSettings, enrolment: Enrolment) -> DeviceData:
    key = run_key(enrolment.seed).child("split", settings.device)
    own = split(load(settings.data, None), settings.test_fraction, enrolment.validation_fraction, key)
    return replace(check_fits(own, enrolment.spec), mean=enrolment.mean, std=enrolment.std)


def _method_of(enrolment: Enrolment) -> Method[Any, Any, Any, Any]:
    settings = {key: value for key, value in enrolment.method.items() if key != "name"}
    return create(str(enrolment.method.get("name")), enrolment.spec, settings)


def _choose(
    settings: DeviceSettings,
    enrolment: Enrolment,
    method: Method[Any, Any, Any, Any],
    num_samples: int,
) -> DeviceReport:
    """The device's report with the ratio it has chosen."""
    board = board_named(settings.board)
    report = report_of(
        settings.device, board, num_samples=num_samples, flops_per_sample=enrolment.flops_per_sample
    )
    decision = decide(
        method.choices(report),
        report,
        wanted=board.ratio if settings.ratio is None else settings.ratio,
        epochs=enrolment.training.epochs,
        deadline_s=enrolment.deadline_s,
    )
    if decision.choice is None:
        raise ModelError(decision.reason)
    return replace(report, ratio=decision.choice.ratio, reason=decision.reason)


def _session(
    enrolment: Enrolment,
    method: Method[Any, Any, Any, Any],
    trainer: LocalTrainer,
    memory: FileMemory,
    report: DeviceReport,
) -> Session:
    """Go on with what the device has of this run, or begin; it is never begun anew over something damaged."""
    try:
        return Session(enrolment, report.device, method, trainer, memory, budget=Budget(report.ratio))
    except PacketError as problem:
        raise StoreError(
            f"{memory.path} is damaged ({problem}); restore it, or remove it to start from the common model"
        ) from None


def _backend(spec: ModelSpec, threads: int) -> Backend:
    try:
        import torch

        from edge_agent.torch_trainer import TorchBackend
    except ImportError:
        raise ModelError("no trainer is installed here: pip install 'fleetune[torch]'") from None
    torch.set_num_threads(threads)
    return TorchBackend.from_spec(spec)
