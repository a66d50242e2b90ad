"""Where torch computes: the processor, or a card beside it with a memory of its own."""

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
    """A device by torch's name for it (`cpu`, `cuda:1`, `mps`, `xpu:0`), made ready to compute by the same
    bits each time, in full float32.

    Raises:
        ModelError: torch knows no such device, or none is here.
    """
    try:
        device = torch.device(name)
        if device == PROCESSOR:
            return PROCESSOR
        module = torch.get_device_module(device)
        count = module.device_count() if module.is_available() else 0
    except (RuntimeError, AttributeError) as problem:
        raise ModelError(f"device {name}: torch here has no such device; cpu always trains") from problem
    if not count:
        raise ModelError(
            f"device {name}: torch {torch.__version__} sees no {device.type} here; cpu always trains"
        )
    if (device.index or 0) >= count:
        raise ModelError(f"device {name}: the last one here is {device.type}:{count - 1}")
    found = torch.device(device.type, device.index or 0)
    if hasattr(module, "set_device"):  # else memory is taken of the first card, too
        module.set_device(found)
    _make_deterministic()
    return found


def name_of(device: torch.device) -> str:
    """What its maker calls it, where torch can tell."""
    tell = getattr(torch.get_device_module(device), "get_device_name", None)
    return str(tell(device)) if tell else device.type


def _make_deterministic() -> None:
    """Kernels that give the same bits each time, where torch has them, and no word where it has not; no TF32,
    which rounds at ten bits.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    warnings.filterwarnings("ignore", message=".*does not have a deterministic implementation")
    torch.backends.cudnn.allow_tf32 = False


def autocast_to(precision: Precision, device: torch.device) -> AbstractContextManager[object]:
    """Forward passes compute in it wherever torch holds that it does no harm; their backward passes do as
    they did.
    """
    if precision == "float32":
        return nullcontext()
    return torch.autocast(device.type, torch.bfloat16)


def for_numpy(tensor: Tensor) -> Tensor:
    """A tensor that numpy can read."""
    return tensor if tensor.device == PROCESSOR else tensor.to(PROCESSOR)


def generator_states(device: torch.device) -> list[bytes]:
    """Of torch's global generators, the processor's and the device's."""
    states = [torch.default_generator.get_state()]
    if device != PROCESSOR:
        states.append(torch.get_device_module(device).get_rng_state(device))
    return [state.numpy().tobytes() for state in states]


@contextmanager
def fork_seeded(key: Key, device: torch.device = PROCESSOR) -> Iterator[None]:
    """Torch's global generators, the processor's and the device's, at `key`, and back where they were
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
