"""Chooses the backend that trains, by the installed packages, the owner's option, and the run's needs."""

import importlib.metadata
import importlib.util
import sys
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal, get_args

from fleetune.edge_agent.training.backend import Backend
from fleetune.edge_agent.training.onnx_providers import providers
from fleetune.edge_agent.training.ort_training_package import MISSING
from fleetune.edge_agent.training.smaller_network import is_worth_shrinking
from fleetune.edge_agent.training.step_guard import StepGuard
from fleetune.protocols.bundle.bundle import Bundle
from fleetune.protocols.errors import ModelError, SettingError
from fleetune.protocols.model.backbone_file import Tensors
from fleetune.protocols.model.spec import ModelSpec
from fleetune.protocols.settings.section import PROCESSOR, Precision
from fleetune.protocols.tasks import CLASSIFICATION
from fleetune.protocols.tasks.task import Task

Kind = Literal["onnx", "torch", "ort-training"]
AUTO = "auto"
KINDS: tuple[Kind, ...] = get_args(Kind)

# Resident bytes after the import, beyond those of the agent (x86-64: torch 2.13 CPU, onnxruntime 1.31, its
# training package 1.19.2; measured). `edge_agent.budget.cost_forecast` has the memory of the first step.
IMPORT_BYTES: dict[Kind, int] = {"torch": 190_000_000, "onnx": 20_000_000, "ort-training": 17_000_000}

# Names for pip. They exist with a wheel and with a checkout alike.
PIP: dict[str, str] = {
    "onnx": "onnxruntime",
    "torch": "torch",
    "ort-training": "--no-deps onnxruntime-training-cpu==1.19.2",
}

ORT_TRAINING = frozenset({"onnxruntime-training-cpu", "onnxruntime-training"})


def installed() -> tuple[Kind, ...]:
    """Return the trainers that can be imported here, the lightest first, without importing any."""
    return tuple(kind for kind in KINDS if _is_installed(kind))


def _is_installed(kind: Kind) -> bool:
    if kind != "ort-training":
        return importlib.util.find_spec("torch" if kind == "torch" else "onnxruntime") is not None
    return bool(installed_packages() & ORT_TRAINING)


def installed_packages() -> set[str]:
    """Return the names of all packages in this Python environment."""
    return {found.metadata["Name"] for found in importlib.metadata.distributions()}


@dataclass
class Trainers:
    """Chooses the trainer of each run.

    Attributes:
        choice: the owner's option: one of `KINDS`, or "auto" for the lightest one that fits the run.
        lacking: why a run has no bundle, by the run's id.
        train_on: device that computes.
        usable: trainers of `KINDS` that are installed here and can compute on `train_on`.

    Raises:
        SettingError: the choice is unknown.
        ModelError: the chosen trainer or every trainer is missing, or it cannot compute on the device.
    """

    choice: str = AUTO
    lacking: dict[str, str] = field(default_factory=dict)
    train_on: str = PROCESSOR

    def __post_init__(self) -> None:
        if self.choice not in (AUTO, *KINDS):
            raise SettingError(f"--trainer {self.choice} is unknown; choose {AUTO}, {', '.join(KINDS)}")
        self.usable = installed()
        if not self.usable:
            torch = f"or, for models of your own, pip install {PIP['torch']}"
            raise ModelError(f"no trainer is installed here; pip install {PIP['onnx']}, {torch}")
        if self.choice == "ort-training" and self.choice not in self.usable:
            raise ModelError(MISSING)
        if self.choice != AUTO and self.choice not in self.usable:
            raise ModelError(
                f"--trainer {self.choice} is not installed here, only {', '.join(self.usable)};"
                f" pip install {PIP[self.choice]}, or choose another trainer"
            )
        chosen = [kind for kind in self.usable if self.choice in (AUTO, kind)]
        problems = {kind: _problem_on(kind, self.train_on) for kind in chosen}
        self.usable = tuple(kind for kind, problem in problems.items() if problem is None)
        if not self.usable:
            known = [problem for problem in problems.values() if problem is not None]
            found = " and ".join(problem.found for problem in known)
            remedies = ", or ".join(problem.remedy for problem in known)
            raise ModelError(
                f"--train-on {self.train_on}: {found}; {remedies}, or leave out --train-on (the processor)"
            )

    def kind(self, run: str) -> Kind:
        """Return the trainer of a run.

        Raises:
            ModelError: the run has no bundle, and torch is not installed or not chosen.
        """
        chosen = next(kind for kind in self.usable if self.choice in (AUTO, kind))
        if chosen == "torch" or run not in self.lacking:
            return chosen
        if self.choice == AUTO and "torch" in self.usable:
            return "torch"
        raise ModelError(f"{self.lacking[run]}; torch can train it: pip install {PIP['torch']}")


def _problem_on(kind: Kind, device: str) -> ModelError | None:
    """Return why a trainer cannot compute on a device; None if it can.

    This imports the trainer, unless the device is the processor.
    """
    if device == PROCESSOR:
        return None
    if kind == "ort-training":
        return ModelError("ort-training trains only on the processor; choose another --trainer")
    try:
        if kind == "torch":
            from fleetune.edge_agent.training.gpu.torch_device import torch_device

            torch_device(device)
        else:
            from fleetune.edge_agent.training.onnx_sessions import runtime

            providers(runtime(), device)
    except ModelError as problem:
        return problem
    return None


def needs_bundle(kind: Kind) -> bool:
    """True if a trainer needs the model's bundle. torch does not: it builds the model by its name."""
    return kind != "torch"


def trains_smaller(kind: Kind, spec: ModelSpec) -> bool:
    """True if a trainer trains sub-models of this model as smaller networks."""
    return kind == "onnx" or (kind == "torch" and is_worth_shrinking(spec))


def make_backend(
    kind: Kind,
    spec: ModelSpec,
    bundle: Bundle | None,
    threads: int,
    *,
    task: Task = CLASSIFICATION,
    frozen: Tensors = MappingProxyType({}),
    guard: StepGuard | None = None,
    room: int | None = None,
    cache_bytes: int = 0,
    device: str = PROCESSOR,
    precision: Precision = "float32",
) -> Backend:
    """Return the backend of a model.

    Args:
        kind: the trainer.
        spec: description of the model.
        bundle: the model's bundle, see `needs_bundle`.
        threads: processor threads.
        task: the run's task, which has the loss.
        frozen: tensors of the model's backbone, which are not copied.
        guard: may end a step early, if the backend supports it.
        room: most bytes that a step of a bundle may take; None for as many as the model's description allows.
        cache_bytes: ONNX Runtime keeps the memory of steps up to this size. Devices keep none.
        device: device that computes, by torch's name for it, or see `onnx_providers`.
        precision: precision of torch's training steps, see `FleetSection`. Other trainers have only one.

    Raises:
        ModelError: the model cannot be built here or differs from the fleet's, or the device is missing.
    """
    if kind == "torch":
        if "torch" not in installed():
            raise ModelError(f"torch is not installed here; pip install {PIP['torch']}")
        import torch

        from fleetune.edge_agent.training.gpu.torch_device import torch_device
        from fleetune.edge_agent.training.torch_backend import TorchBackend

        torch.set_num_threads(threads)
        return TorchBackend.from_spec(spec, task, frozen, torch_device(device), precision)
    assert bundle is not None, "needs_bundle says so"
    if bundle.learns != task:
        raise ModelError(
            f"the bundle of model {spec.name} was exported for another [task] than the run's; export it again"
            " with the run's [task]"
        )
    if kind == "ort-training":
        from fleetune.edge_agent.training.ort_training_backend import OrtTrainingBackend

        return OrtTrainingBackend(bundle, threads, frozen=frozen, guard=guard, room=room)
    from fleetune.edge_agent.training.onnx_backend import OnnxBackend

    return OnnxBackend(
        bundle, threads, frozen=frozen, guard=guard, room=room, cache_bytes=cache_bytes, device=device
    )


def check_room(kind: Kind, usable: int | None, held: int) -> None:
    """Raise ModelError if the trainer's own code does not fit into memory, before it is imported.

    Args:
        kind: the trainer.
        usable: bytes that this process may hold; None if unknown.
        held: bytes that it holds.
    """
    module = "torch" if kind == "torch" else "onnxruntime"
    if module not in sys.modules and (problem := room_problem(kind, IMPORT_BYTES[kind], usable, held)):
        raise problem


def room_problem(kind: Kind, needed: int, usable: int | None, held: int) -> ModelError | None:
    """Return the error for a trainer whose code needs `needed` more bytes; None if they fit. See
    `check_room`.
    """
    if usable is None or held + needed <= usable:
        return None
    lighter = f"use --trainer onnx (pip install {PIP['onnx']}), " if kind == "torch" else ""
    return ModelError(
        f"{kind} needs {needed / 1e6:.0f} MB in addition to the {held / 1e6:.0f} MB in use, but this process"
        f" may take only {usable / 1e6:.0f} MB; {lighter}stop other programs, or raise the limit (MemoryMax)"
    )
