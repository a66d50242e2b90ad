"""Devices that torch computes on: the processor, or a GPU with its own memory."""

import os
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor

from fleetune.protocols.errors import ModelError
from fleetune.protocols.randomness import Key
from fleetune.protocols.settings.section import Precision

PROCESSOR = torch.device("cpu")


def torch_device(name: str) -> torch.device:
    """Return a torch device by name (`cpu`, `cuda:1`, `mps`, `xpu:0`), with deterministic kernels and
    float32.

    Raises:
        ModelError: torch knows no such device, or none is present.
    """
    try:
        device = torch.device(name)
        if device == PROCESSOR:
            return PROCESSOR
        module = torch.get_device_module(device)
        count = module.device_count() if module.is_available() else 0
    except (RuntimeError, AttributeError) as problem:
        raise ModelError(f"device {name} is unknown to torch; choose another, such as cpu") from problem
    if not count:
        raise ModelError(
            f"device {name}: torch {torch.__version__} finds no {device.type} here; choose another, such"
            " as cpu"
        )
    if (device.index or 0) >= count:
        raise ModelError(f"device {name} does not exist; the last one here is {device.type}:{count - 1}")
    found = torch.device(device.type, device.index or 0)
    if hasattr(module, "set_device"):  # otherwise torch takes memory of the first GPU too
        module.set_device(found)
    _make_deterministic()
    return found


def name_of(device: torch.device) -> str:
    """Return the vendor's name of a device; "" if torch does not know it."""
    tell = getattr(torch.get_device_module(device), "get_device_name", None)
    return str(tell(device)) if tell else device.type


def _make_deterministic() -> None:
    """Choose deterministic kernels, without warnings where torch has none, and switch off TF32.

    TF32 rounds factors to ten bits.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    warnings.filterwarnings("ignore", message=".*does not have a deterministic implementation")
    torch.backends.cudnn.allow_tf32 = False


def autocast_to(precision: Precision, device: torch.device) -> AbstractContextManager[object]:
    """Return a context in which torch computes forward passes in this precision, where torch considers it
    safe.

    Backward passes use the types of the forward pass.
    """
    if precision == "float32":
        return nullcontext()
    return torch.autocast(device.type, torch.bfloat16)


def for_numpy(tensor: Tensor) -> Tensor:
    """Return the tensor on the processor, where numpy can read it."""
    return tensor if tensor.device == PROCESSOR else tensor.to(PROCESSOR)


def generator_states(device: torch.device) -> list[bytes]:
    """Return the states of torch's global generators, on the processor and on the device."""
    states = [torch.default_generator.get_state()]
    if device != PROCESSOR:
        states.append(torch.get_device_module(device).get_rng_state(device))
    return [state.numpy().tobytes() for state in states]


@contextmanager
def fork_seeded(key: Key, device: torch.device = PROCESSOR) -> Iterator[None]:
    """Seed torch's global generators, on the processor and the device, by `key`, and restore them
    afterwards.
    """
    generator = torch.default_generator
    state = generator.get_state()
    generator.manual_seed(key.value)
    try:
        if device == PROCESSOR:
            yield
        else:
            with torch.random.fork_rng([device.index], device_type=device.type):
                torch.get_device_module(device).manual_seed(key.value)
                yield
    finally:
        generator.set_state(state)
