"""Devices that ONNX Runtime computes on: the processor, or a GPU with an execution provider."""

import contextlib
import io
from typing import Any

from fleetune.protocols.errors import ModelError
from fleetune.protocols.settings.section import PROCESSOR

OLDEST = (1, 16)
_ON_PROCESSOR, _CUDA = "CPUExecutionProvider", "CUDAExecutionProvider"
_OF_CARDS = {
    "cuda": (_CUDA,),
    # an operator that the first provider lacks runs on the next one
    "tensorrt": ("TensorrtExecutionProvider", _CUDA),
}

# no timing of algorithms, as another process would distort it
_CONVOLUTIONS_BY_RULE = {"cudnn_conv_algo_search": "HEURISTIC"}
# TF32 rounds factors to ten bits. The processor does not, and torch on a GPU does not here.
_WHOLE_FLOATS, _WHOLE_FLOATS_SINCE = {"use_tf32": "0"}, (1, 18)

Provider = str | tuple[str, dict[str, str]]


def providers(runtime: Any, device: str) -> list[Provider]:
    """Return the execution providers of a session, in order of preference.

    Args:
        runtime: the module `onnxruntime`.
        device: `cpu`, `cuda` or `tensorrt`; a colon and a number choose a GPU, as in `cuda:1`.

    Raises:
        ModelError: the device is unknown, or the installed package cannot compute on it.
    """
    if device == PROCESSOR:
        return [_ON_PROCESSOR]
    kind, _, number = device.partition(":")
    if kind not in _OF_CARDS or not (number or "0").isdigit():
        known = ", ".join((PROCESSOR, *_OF_CARDS))
        raise ModelError(
            f"device {device} is unknown to onnxruntime; choose {known}, or a GPU by number as in cuda:1"
        )
    there = runtime.get_available_providers()
    if _OF_CARDS[kind][0] not in there:
        raise ModelError(
            f"onnxruntime {runtime.__version__} here cannot compute on {kind}; install the package"
            " onnxruntime-gpu in place of onnxruntime, or NVIDIA's own wheel on a Jetson"
        )
    # newer versions warn of plugins; they may report a missing library
    runtime.set_default_logger_severity(3)
    _load_libraries(runtime)
    options = {"device_id": number or "0"}
    of_cuda = _CONVOLUTIONS_BY_RULE | (
        _WHOLE_FLOATS if version(runtime.__version__) >= _WHOLE_FLOATS_SINCE else {}
    )
    of_card = [
        (name, options | (of_cuda if name == _CUDA else {})) for name in _OF_CARDS[kind] if name in there
    ]
    return [*of_card, _ON_PROCESSOR]


def version(text: str) -> tuple[int, int]:
    """Return the first two numbers of a version of ONNX Runtime."""
    first, second = text.split(".")[:2]
    return int(first), int(second)


def check_version(text: str) -> None:
    """Raise ModelError if this version of ONNX Runtime is too old."""
    if version(text) < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        raise ModelError(
            f"onnxruntime {text} is too old; install {oldest} or newer: pip install 'onnxruntime>={oldest}'"
        )


def _load_libraries(runtime: Any) -> None:
    """Load CUDA's libraries that pip installed (`onnxruntime-gpu[cuda,cudnn]`), which no linker finds.

    The system's own libraries are found without this. Its warnings are discarded, as `check_used` reports a
    missing library.
    """
    if hasattr(runtime, "preload_dlls"):  # exists since version 1.21
        with contextlib.redirect_stdout(io.StringIO()):
            runtime.preload_dlls()


def check_used(session: Any, device: str) -> None:
    """Raise ModelError if the runtime fell back to the processor because a library is missing."""
    if device != PROCESSOR and session.get_providers()[0] == _ON_PROCESSOR:
        raise ModelError(
            f"onnxruntime cannot load the GPU libraries (CUDA, cuDNN) for {device} and would train on the"
            " processor; install the library versions that it was built for, or leave out --train-on"
        )
