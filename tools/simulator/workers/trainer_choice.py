"""Chooses the trainer of a simulated run, `fleet.trainer`, and makes the bundle from which ONNX Runtime
trains.

A worker does this, because it needs torch. The process that runs the rounds never imports torch.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Literal, TypeVar

import msgspec
import numpy as np

from fleetune.coordinator.run.models import find_model, is_at_hand, make_run_bundle
from fleetune.edge_agent.training.backend import Backend
from fleetune.edge_agent.training.cached_features import cache_features, upper_layers_of
from fleetune.edge_agent.training.device_data import DeviceData, for_vocabulary
from fleetune.edge_agent.training.local_training import LocalTrainer
from fleetune.edge_agent.training.single_sample_batches import norms_with_fixed_statistics
from fleetune.edge_agent.training.trainers import PIP, installed, make_backend
from fleetune.protocols.bundle.bundle import Bundle, read_bundle
from fleetune.protocols.errors import FleetuneError, ModelError, SettingError, TrainingDiverged
from fleetune.protocols.method.trainer import FitPlan
from fleetune.protocols.model.backbone_file import Tensors, read_backbone
from fleetune.protocols.model.spec import Backbone
from fleetune.protocols.randomness import Key
from fleetune.protocols.settings.run_settings import RunSettings
from fleetune.protocols.settings.section import PROCESSOR
from fleetune.protocols.wire.payloads import Enrolment

Kind = Literal["torch", "onnx"]

TRIED_STEPS = 12  # steps of each trainer in a repetition
TURNS = 6  # repetitions; the first is a warm-up
# memory that ONNX Runtime keeps between steps; small, because a worker serves many devices
STEP_BYTES = 2**24
CACHED = 4  # bundles and measurements that a process caches; parallel runs share them

_Cached = TypeVar("_Cached", Bundle, float)
_bundles: dict[bytes, Bundle] = {}
_shares: dict[bytes, float] = {}


@dataclass(frozen=True)
class TrainerChoice:
    """The trainer of a run.

    Attributes:
        kind: kind of the trainer.
        bundle: the encoded bundle that it trains from; None: torch needs none.
        words: the reason, if the choice was measured; "": the settings name the trainer.
    """

    kind: Kind = "torch"
    bundle: bytes | None = None
    words: str = ""


def choose_trainer(
    settings: RunSettings, enrolment: Enrolment, backbone: bytes | None, data: DeviceData
) -> TrainerChoice:
    """The trainer that `fleet.trainer` names, or the fastest one.

    Args:
        settings: settings of the run.
        enrolment: enrolment of the run.
        backbone: the file of the model's frozen part; None: nothing is frozen.
        data: the data of one device, for the measurement.

    Raises:
        SettingError: the chosen trainer is not installed, the model has no bundle, or a GPU is missing.
    """
    has_torch = "torch" in installed()
    if not has_torch and (settings.fleet.cards or settings.fleet.trainer == "torch"):
        raise SettingError(
            f"fleet.trainer: torch is not installed here: pip install {PIP['torch']};"
            ' or let ONNX Runtime train: trainer = "onnx"'
        )
    found = (
        _on_cards(settings),
        _in_precision(settings, enrolment, backbone, data),
    )
    if any(found):
        return TrainerChoice(words="; ".join(filter(None, found)))
    if settings.fleet.trainer == "torch":
        return TrainerChoice()
    try:
        bundle = _bundle(settings, enrolment)
    except SettingError as problem:
        if settings.fleet.trainer == "fastest":
            return TrainerChoice(words=f"torch trains: {problem}")
        raise
    if settings.fleet.trainer == "onnx":
        return TrainerChoice("onnx", bundle.encoded())
    if not has_torch:
        return TrainerChoice("onnx", bundle.encoded(), "ONNX Runtime trains: torch is not installed here")
    return _fastest(settings, enrolment, bundle, backbone, data)


def _on_cards(settings: RunSettings) -> str:
    """A line about the GPUs that torch trains on. Raises SettingError: they are missing."""
    fleet = settings.fleet
    if not fleet.cards:
        return ""
    from fleetune.edge_agent.training.gpu.torch_device import name_of, torch_device

    if fleet.trainer == "onnx":
        raise SettingError(f'fleet.trainer: "onnx" trains on the processor, not on {fleet.train_on}')
    if PROCESSOR in fleet.cards:
        raise SettingError(
            f"fleet.train_on {fleet.train_on}: cpu and cards round differently, and which device trains on"
            " which is left to chance; name either"
        )
    try:
        names = [f"{card} ({name_of(torch_device(card))})" for card in fleet.cards]
    except ModelError as problem:
        raise SettingError(f"fleet.train_on: {problem}") from None
    return f"devices train on {', '.join(names)}"


def _in_precision(
    settings: RunSettings, enrolment: Enrolment, backbone: bytes | None, data: DeviceData
) -> str:
    """A line about the gain of the precision. Raises SettingError: the model cannot train in it."""
    fleet, asked = settings.fleet, f'fleet.precision = "{settings.fleet.precision}"'
    if fleet.precision == "float32":
        return ""
    if fleet.trainer != "torch":
        raise SettingError(f'{asked}: torch trains in it, not trainer = "{fleet.trainer}"')
    measured = f"training steps compute in {fleet.precision}"
    if not len(data.y_train):
        return measured
    frozen, device = _frozen(enrolment, backbone), fleet.trains_on(0)
    try:
        trained = {
            precision: make_backend(
                "torch",
                enrolment.spec,
                None,
                1,
                task=enrolment.learns,
                frozen=frozen,
                device=device,
                precision=precision,
            )
            for precision in ("float32", fleet.precision)
        }
        clock = time.perf_counter if fleet.cards else time.process_time
        times = _times(trained, enrolment, data, clock)
    except TrainingDiverged:  # the run itself reports this error
        return measured
    except ModelError as problem:
        raise SettingError(
            f"{asked}: not with model {enrolment.spec.name}: {problem}; leave it out"
        ) from None
    share = times[fleet.precision] / max(times["float32"], 1e-9)
    slower = "" if share < 1 else ": leave it out, it gains nothing here"
    return f"{measured}, which take {share:.2f} of the time that float32 takes{slower}"


def _fastest(
    settings: RunSettings, enrolment: Enrolment, bundle: Bundle, backbone: bytes | None, data: DeviceData
) -> TrainerChoice:
    """Measure both trainers, and choose the faster one."""
    if not len(data.y_train):
        return TrainerChoice(words="torch trains: the first device has no samples to try both on")
    alike = _of_run(settings) + msgspec.json.encode(enrolment.training)
    try:
        share = _shares.get(alike) or _share_of_torch(enrolment, bundle, backbone, data)
    except FleetuneError as problem:  # for example an ONNX Runtime that is too old for the bundle
        return TrainerChoice(words=f"torch trains: {problem}")
    _keep(_shares, alike, share)
    measured = f"ONNX Runtime takes {share:.2f} of the processor time that torch takes for a training step"
    if share < 1:
        return TrainerChoice("onnx", bundle.encoded(), f"ONNX Runtime trains: {measured}")
    return TrainerChoice(words=f"torch trains: {measured}")


def _bundle(settings: RunSettings, enrolment: Enrolment) -> Bundle:
    if "onnx" not in installed():
        raise SettingError(f"fleet.trainer: ONNX Runtime is not installed here: pip install {PIP['onnx']}")
    at_hand = _bundles.get(_of_run(settings))
    try:
        if at_hand is None:
            at_hand = find_model(settings).bundle if is_at_hand(settings) else make_run_bundle(settings)
        assert at_hand is not None, "is_at_hand says so"
        _keep(_bundles, _of_run(settings), at_hand)
        return at_hand.for_devices(enrolment.spec)
    except FleetuneError as problem:
        raise SettingError(f'fleet.trainer: {problem}; trainer = "torch" simulates it') from None


def _of_run(settings: RunSettings) -> bytes:
    """The part of a run that its bundle depends on, as a key."""
    return msgspec.json.encode((settings.model, settings.task, settings.data, settings.run.seed))


def _keep(known: dict[bytes, _Cached], key: bytes, value: _Cached) -> None:
    known[key] = value
    while len(known) > CACHED:
        del known[next(iter(known))]


def _share_of_torch(enrolment: Enrolment, bundle: Bundle, backbone: bytes | None, data: DeviceData) -> float:
    """Time of training steps with ONNX Runtime, divided by the time with torch."""
    frozen = _frozen(enrolment, backbone)
    kinds: tuple[Kind, ...] = ("torch", "onnx")
    backends: dict[str, Backend] = {
        kind: make_backend(
            kind, enrolment.spec, bundle, 1, task=enrolment.learns, frozen=frozen, cache_bytes=STEP_BYTES
        )
        for kind in kinds
    }
    times = _times(backends, enrolment, data)
    return times["onnx"] / max(times["torch"], 1e-9)


def _times(
    backends: Mapping[str, Backend],
    enrolment: Enrolment,
    data: DeviceData,
    clock: Callable[[], float] = time.process_time,
) -> dict[str, float]:
    """Seconds of some steps with each backend: the minimum over alternating repetitions, in processor time
    by default.
    """
    rows = np.resize(np.arange(len(data.y_train)), TRIED_STEPS * enrolment.training.batch_size)
    tried = replace(data, x_train=data.x_train[rows], y_train=data.y_train[rows], order=None)
    trainers = {name: _trainer(backend, enrolment, tried) for name, backend in backends.items()}
    times: dict[str, list[float]] = {name: [] for name in backends}
    for turn in range(TURNS):
        for name, trainer in trainers.items():
            began = clock()
            trainer.fit(enrolment.weights, FitPlan(epochs=1), Key.of("trainer choice", turn))
            times[name].append(clock() - began)
    return {name: min(taken[1:]) for name, taken in times.items()}


def norms_on_single_samples(enrolment: Enrolment, backbone: bytes | None, trains: TrainerChoice) -> list[str]:
    """Norm layers that do not train on single samples with the run's trainer, see `resting_norms`.

    Raises:
        ModelError: the model cannot train on one sample.
    """
    bundle = None if trains.bundle is None else read_bundle(trains.bundle)
    frozen = _frozen(enrolment, backbone)
    return norms_with_fixed_statistics(
        make_backend(trains.kind, enrolment.spec, bundle, 1, task=enrolment.learns, frozen=frozen)
    )


def _frozen(enrolment: Enrolment, backbone: bytes | None) -> Tensors:
    """The frozen tensors of the model."""
    described = enrolment.spec.backbone
    if backbone is None or not isinstance(described, Backbone):
        return {}
    return read_backbone(memoryview(bytearray(backbone)), described)  # torch requires writable arrays


def _trainer(backend: Backend, enrolment: Enrolment, data: DeviceData) -> LocalTrainer:
    data, upper = for_vocabulary(data, backend.vocabulary), upper_layers_of(backend, enrolment.training)
    if upper is None:
        return LocalTrainer(backend, data, enrolment.training)
    return LocalTrainer(upper.backend, cache_features(upper, data), enrolment.training)
