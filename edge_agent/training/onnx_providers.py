"""What ONNX Runtime computes on: the processor, or a card that one of its execution providers serves."""

import contextlib
import io
from typing import Any

from fleetune.protocols.errors import ModelError
from fleetune.protocols.settings.section import PROCESSOR

_ON_PROCESSOR, _CUDA = "CPUExecutionProvider", "CUDAExecutionProvider"
_OF_CARDS = {
    "cuda": (_CUDA,),
    # what the first one cannot do the next one does
    "tensorrt": ("TensorrtExecutionProvider", _CUDA),
}

_CONVOLUTIONS_BY_RULE = {"cudnn_conv_algo_search": "HEURISTIC"}  # not by a race, which another process loses
# Factors are not rounded to ten bits: they are not on the processor, and not by torch on a card.
_WHOLE_FLOATS, _WHOLE_FLOATS_SINCE = {"use_tf32": "0"}, (1, 18)

Provider = str | tuple[str, dict[str, str]]


def providers(runtime: Any, device: str) -> list[Provider]:
    """Those for a session, the first that can do an operator does it.

    Args:
        runtime: the module `onnxruntime`.
        device: `cpu`, or `cuda` or `tensorrt`, with a card's number behind a colon: `cuda:1`.

    Raises:
        ModelError: no such device is known, or what is installed cannot compute on it.
    """
    if device == PROCESSOR:
        return [_ON_PROCESSOR]
    kind, _, number = device.partition(":")
    if kind not in _OF_CARDS or not (number or "0").isdigit():
        known = ", ".join((PROCESSOR, *_OF_CARDS))
        raise ModelError(f"onnxruntime trains on none called {device}; choose {known}, or cuda:1 and so on")
    there = runtime.get_available_providers()
    if _OF_CARDS[kind][0] not in there:
        raise ModelError(
            f"onnxruntime {runtime.__version__} here cannot compute on {kind}; it takes the package"
            " onnxruntime-gpu in place of onnxruntime, on a Jetson NVIDIA's own wheel"
        )
    runtime.set_default_logger_severity(3)  # newer ones warn of plugins; which library is missing it may say
    _load_libraries(runtime)
    options = {"device_id": number or "0"}
    of_cuda = _CONVOLUTIONS_BY_RULE | (_WHOLE_FLOATS if version(runtime) >= _WHOLE_FLOATS_SINCE else {})
    of_card = [
        (name, options | (of_cuda if name == _CUDA else {})) for name in _OF_CARDS[kind] if name in there
    ]
    return [*of_card, _ON_PROCESSOR]


def version(runtime: Any) -> tuple[int, int]:
    """Of the module `onnxruntime`: its first two numbers."""
    first, second = runtime.__version__.split(".")[:2]
    return int(first), int(second)


def _load_libraries(runtime: Any) -> None:
    """CUDA's libraries that pip installed (`onnxruntime-gpu[cuda,cudnn]`) lie where no linker looks; those of
    the system are found anyhow. What it prints where one is missing is `check_used`'s to say.
    """
    if hasattr(runtime, "preload_dlls"):  # since 1.21
        with contextlib.redirect_stdout(io.StringIO()):
            runtime.preload_dlls()


def check_used(session: Any, device: str) -> None:
    """Raises ModelError: the runtime fell back to the processor, as it does where a library is missing."""
    if device != PROCESSOR and session.get_providers()[0] == _ON_PROCESSOR:
        raise ModelError(
            f"onnxruntime could not load what it needs for {device} (CUDA, cuDNN; TensorRT) and would train"
            " on the processor: install these in the versions it was built for, or leave --train-on out"
        )
