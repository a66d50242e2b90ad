"""Makes batch norms over a single value use their running statistics, because torch rejects such input."""

import inspect
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode


class SingleValueNorms(TorchFunctionMode):
    """Context in which a batch norm with one value a channel uses its running statistics.

    The running statistics do not change. One sample with several positions a channel is normalised by its own
    statistics, as in torch.

    Raises:
        ValueError: in a forward pass, if such a batch norm has no running statistics.
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: object, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is not functional.batch_norm:
            return func(*args, **kwargs)
        call = inspect.signature(func).bind(*args, **kwargs)
        call.apply_defaults()
        if call.arguments["training"] and has_single_values(call.arguments["input"]):
            if call.arguments["running_mean"] is None:
                raise ValueError(
                    "a batch norm without running statistics has one value a channel; let it track them"
                    " (track_running_stats=True), or give the device a second sample"
                )
            call.arguments["training"] = False
        return func(*call.args, **call.kwargs)


def has_single_values(x: Tensor) -> bool:
    """True if the input of a batch norm has one value a channel."""
    return x.ndim > 1 and x.numel() == x.shape[1]
