"""Chooses the model and the trainer of a simulated run (`fleet.trainer`).

Results that need torch come from a worker, so that the process of the rounds never imports torch.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import msgspec

from fleetune.coordinator.run.models import Model, find_model, is_at_hand, make_run_bundle
from fleetune.edge_agent.training.trainers import PIP, installed
from fleetune.protocols.bundle.bundle import Bundle
from fleetune.protocols.errors import FleetuneError, ModelError, SettingError
from fleetune.protocols.settings.run_settings import RunSettings
from fleetune.protocols.settings.section import PROCESSOR
from fleetune.protocols.wire.payloads import Enrolment
from fleetune.tools.simulator.workers.worker_processes import WorkerProcesses

MOST_BUNDLES = 4  # that a process caches, because the runs of a comparison share them

_Answer = TypeVar("_Answer")
_bundles: dict[bytes, Bundle] = {}


@dataclass(frozen=True)
class TrainerChoice:
    """The trainer of a run.

    Attributes:
        kind: kind of the trainer.
        bundle: the encoded bundle from which the trainer trains; None for torch, which needs none.
        notice: a line for the user about GPUs and precision, or "".
    """

    kind: Literal["torch", "onnx"] = "torch"
    bundle: bytes | None = None
    notice: str = ""


def run_model(settings: RunSettings, *, workers: int) -> Model:
    """Return the run's model; with `workers` = 0 this process computes it."""
    return _ask(find_model, settings, workers=0 if is_at_hand(settings) else workers)


def run_trainer(settings: RunSettings, enrolment: Enrolment, *, workers: int) -> TrainerChoice:
    """Return the trainer that `fleet.trainer` names; with `workers` = 0 this process prepares it.

    Raises:
        SettingError: the trainer is not installed or does not support the settings in [fleet], the model has
            no bundle, or a GPU is missing.
    """
    fleet = settings.fleet
    if fleet.trainer == "torch" and "torch" not in installed():
        raise SettingError(
            f'fleet.trainer = "torch": torch is not installed here; pip install {PIP["torch"]}, or set'
            ' fleet.trainer = "onnx"'
        )
    if fleet.trainer == "onnx":
        for key, value, only in (
            ("train_on", fleet.train_on, PROCESSOR),
            ("precision", fleet.precision, "float32"),
        ):
            if value != only:
                raise SettingError(
                    f'fleet.{key} = "{value}" needs fleet.trainer = "torch", and it is "onnx"; change either'
                )
        return _ask(_onnx_trainer, settings, enrolment, workers=workers)
    notices = [_ask(_cards, settings, workers=workers)] if fleet.cards else []
    if fleet.precision != "float32":
        notices.append(f"training steps compute in {fleet.precision}")
    return TrainerChoice(notice="; ".join(notices))


def _ask(function: Callable[..., _Answer], *arguments: Any, workers: int) -> _Answer:
    if not workers:
        return function(*arguments)
    with WorkerProcesses(1) as aside:
        answer: _Answer = aside.submit(function, *arguments).result()
    return answer


def _cards(settings: RunSettings) -> str:
    """Return a line about the GPUs on which torch trains. Raises SettingError if they are missing."""
    from fleetune.edge_agent.training.gpu.torch_device import name_of, torch_device

    fleet = settings.fleet
    if PROCESSOR in fleet.cards:
        raise SettingError(
            f'fleet.train_on = "{fleet.train_on}" names the processor and cards, which round differently;'
            " name cards only, or cpu only"
        )
    try:
        names = [f"{card} ({name_of(torch_device(card))})" for card in fleet.cards]
    except ModelError as problem:
        raise SettingError(f"fleet.train_on: {problem}") from None
    return f"devices train on {', '.join(names)}"


def _onnx_trainer(settings: RunSettings, enrolment: Enrolment) -> TrainerChoice:
    """Return ONNX Runtime with the run's bundle. Raises SettingError if it is not installed, or has no
    bundle.
    """
    if "onnx" not in installed():
        raise SettingError(
            f'fleet.trainer = "onnx": ONNX Runtime is not installed here; pip install {PIP["onnx"]}, or set'
            ' fleet.trainer = "torch"'
        )
    key = msgspec.json.encode((settings.model, settings.task, settings.data, settings.run.seed))
    try:
        bundle = _bundles.get(key)
        if bundle is None:
            bundle = find_model(settings).bundle if is_at_hand(settings) else make_run_bundle(settings)
        assert bundle is not None, "is_at_hand says so"
        _bundles[key] = bundle
        while len(_bundles) > MOST_BUNDLES:
            del _bundles[next(iter(_bundles))]
        return TrainerChoice("onnx", bundle.for_devices(enrolment.spec).encoded())
    except FleetuneError as problem:
        raise SettingError(
            f'fleet.trainer = "onnx": {problem}; fleet.trainer = "torch" trains this model'
        ) from None
