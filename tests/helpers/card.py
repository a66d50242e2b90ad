"""A fake GPU for torch: the device `card`, with two cards that have separate memories.

Its tensors are computed by the processor's own kernels, so results must be equal to the bit. A call with
tensors of both memories fails, as on a real GPU; only `to` and `copy_` cross over. It does not reproduce the
speed or rounding of a GPU.
"""

from typing import Any, Self

import torch
from torch import Tensor
from torch.utils import backend_registration
from torch.utils._pytree import tree_leaves, tree_map_only

NAME = "card"
_CROSSING = ("aten::to", "aten::_to_copy", "aten::copy_")


class _Cards:
    """The functions that torch requires of a device's module."""

    def is_available(self) -> bool:
        return True

    def is_initialized(self) -> bool:
        return True

    def device_count(self) -> int:
        return 2

    def current_device(self) -> int:
        return 0

    def set_device(self, device: torch.device) -> None:
        assert device.type == NAME

    def get_device_name(self, device: object) -> str:
        return "of this test"

    def get_rng_state(self, device: object = 0) -> Tensor:
        return torch.zeros(8, dtype=torch.uint8)

    def set_rng_state(self, state: Tensor, device: object = 0) -> None: ...

    def manual_seed(self, seed: int) -> None: ...

    def manual_seed_all(self, seed: int) -> None: ...

    def _is_in_bad_fork(self) -> bool:
        return False


class OnCard(Tensor):
    """A tensor on the fake card; `raw` holds its values in processor memory."""

    raw: Tensor

    @staticmethod
    def __new__(cls, raw: Tensor) -> Self:
        made = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls,
            raw.size(),
            strides=raw.stride(),
            storage_offset=raw.storage_offset(),
            dtype=raw.dtype,
            device=torch.device(NAME, 0),
            requires_grad=raw.requires_grad,
        )
        made.raw = raw
        return made

    @property
    def data(self) -> "OnCard":  # type: ignore[override]
        return OnCard(self.raw.detach())

    @data.setter
    def data(self, other: "OnCard") -> None:
        self.raw = other.raw

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: object, args: Any = (), kwargs: Any = None) -> Any:
        return _called(func, args, kwargs or {})


def _called(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    name, device = func._schema.name, kwargs.get("device")
    tensors = [one for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor)]
    on_card = [isinstance(one, OnCard) for one in tensors]
    if name == "aten::copy_":
        _raw(args[0]).copy_(_raw(args[1]))
        return args[0]
    if name not in _CROSSING and any(on_card):
        others = [one for one in tensors if not isinstance(one, OnCard) and one.ndim]
        if others:
            raise RuntimeError(f"Expected all tensors to be on the same device, but {name} got two")
    ends_there = any(on_card) if device is None else torch.device(device).type == NAME
    if device is not None:
        kwargs = {**kwargs, "device": "cpu"}
    result = func(*_raw(args), **_raw(kwargs))
    if name.endswith("_") and isinstance(result, Tensor):  # the operation writes in place
        return args[0]
    return tree_map_only(Tensor, OnCard, result) if ends_there else result


def _raw(values: Any) -> Any:
    return tree_map_only(OnCard, lambda one: one.raw, values)


def _there(func: Any, *args: Any, **kwargs: Any) -> Any:
    return _called(func, args, kwargs)


# torch allows this once in a process
backend_registration._setup_privateuseone_for_python_backend(NAME, _Cards())
_LIBRARY = torch.library.Library("_", "IMPL")
_LIBRARY.fallback(_there, "PrivateUse1")
