"""Reads the tensors of a safetensors file, or of a file that `torch.save` wrote of a state_dict."""

import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from fleetune.protocols.errors import FleetuneError, ModelError
from fleetune.protocols.input_files import open_input
from fleetune.protocols.one_line import flat

_COUNTER = "num_batches_tracked"  # torch saves it with running statistics; no model of ours has it
_WRAPPERS = ("state_dict", "model_state_dict", "model")  # keys of checkpoints that hold the state_dict
_PREFIXES = ("module.", "_orig_mod.")  # DataParallel and torch.compile put them before every name
_NUMPY_READS = ("F16", "F32", "F64", "I8", "I16", "I32", "I64", "U8", "U16", "U32", "U64", "BOOL")
_ZIP_OVERHEAD = 2**20  # bytes beside the tensors that are not worth a look

Arrays = Mapping[str, NDArray[Any]]


def read_weights(path: Path) -> Arrays:
    """Return the tensors in a file by name, without the counters of normalisation layers.

    Raises:
        ModelError: the file is missing, damaged or of another kind, or is read by torch, which is missing.
    """
    with _opened(path) as file:
        start = file.read(9)
    by_torch = start[8:] != b"{" and (start.startswith((b"PK", b"\x80")))
    found = _read_torch(path) if by_torch else _read_safetensors(path)
    return {name: value for name, value in found.items() if not name.endswith(_COUNTER)}


def _opened(path: Path) -> BinaryIO:
    return open_input(path, error=lambda line: ModelError(f"model.weights: cannot read {line}"))


def _read_safetensors(path: Path) -> Arrays:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="numpy") as file:
            kinds = {name: file.get_slice(name).get_dtype() for name in file.keys()}  # noqa: SIM118 - no mapping
            for name, kind in kinds.items():
                if kind not in (*_NUMPY_READS, "BF16"):
                    raise ModelError(f"model.weights: {path}: tensor {name} is {kind}; save it as float32")
            plain = {name: file.get_tensor(name) for name, kind in kinds.items() if kind != "BF16"}
            return plain if len(plain) == len(kinds) else {**plain, **_bfloat16_tensors(path)}
    except FleetuneError:
        raise
    except OSError as problem:
        raise ModelError(f"model.weights: cannot read {path}: {problem.strerror or 'no such file'}") from None
    except SafetensorError as problem:
        raise ModelError(
            f"model.weights: {path} is no safetensors file and no file of torch.save, or damaged ({problem})"
        ) from None


def _bfloat16_tensors(path: Path) -> Arrays:
    """Return the tensors in bfloat16, which NumPy lacks, as float32: their bits are its upper half."""
    from safetensors import deserialize

    found: dict[str, NDArray[Any]] = {}
    with _opened(path) as file:
        tensors = deserialize(file.read())  # type: ignore[no-untyped-call]
    for name, one in tensors:
        if one["dtype"] == "BF16":
            upper = np.frombuffer(one["data"], np.uint16).astype(np.uint32)
            found[name] = (upper << 16).view(np.float32).reshape(one["shape"])
    return found


def _read_torch(path: Path) -> Arrays:
    _check_not_packed(path)
    try:
        import torch
    except ImportError:
        raise ModelError(
            f"model.weights: {path} is read by torch, which is not installed here: pip install torch, or save"
            " it with safetensors.torch.save_file"
        ) from None
    try:
        found = torch.load(path, map_location="cpu", weights_only=True)  # True: no code of the file runs
    except Exception as problem:
        raise ModelError(
            f"model.weights: {path} holds more than tensors, or is damaged; write it with"
            " torch.save(model.state_dict(), FILE)"
        ) from problem
    tensors = _state_dict(found)
    if not tensors:
        raise ModelError(
            f"model.weights: {path} holds {type(found).__name__} without tensors; write it with"
            " torch.save(model.state_dict(), FILE)"
        )
    return {flat(name): _as_array(path, flat(name), value) for name, value in tensors.items()}


def _check_not_packed(path: Path) -> None:
    """Raise ModelError if an archive would take more memory than its length; torch.save never packs."""
    try:
        with _opened(path) as file, zipfile.ZipFile(file) as archive:
            num_bytes = sum(one.file_size for one in archive.infolist())
    except (zipfile.BadZipFile, ValueError):
        return  # no archive, or a damaged one: torch says what is wrong
    if num_bytes > path.stat().st_size + _ZIP_OVERHEAD:
        raise ModelError(
            f"model.weights: {path} is packed, and would unpack to {num_bytes:,} bytes; write it with"
            " torch.save(model.state_dict(), FILE)"
        )


def _as_array(path: Path, name: str, value: Any) -> NDArray[Any]:
    narrow = value.is_floating_point() and value.dtype.itemsize == 2  # NumPy has no bfloat16
    try:
        found: NDArray[Any] = (value.float() if narrow else value).detach().numpy()
    except (RuntimeError, TypeError, NotImplementedError) as problem:  # sparse, quantised, or without values
        raise ModelError(
            f"model.weights: {path}: tensor {name} is {value.dtype}, {value.layout}; save it as float32"
        ) from problem
    return found


def _state_dict(found: Any) -> dict[str, Any]:
    """Return the tensors of a state_dict, or of one in a checkpoint, with the names of the model itself."""
    inner = next((found[key] for key in _WRAPPERS if isinstance(found, dict) and key in found), found)
    state = inner if isinstance(inner, Mapping) else found
    if not isinstance(state, Mapping):
        return {}
    tensors = {str(name): value for name, value in state.items() if hasattr(value, "detach")}
    for prefix in _PREFIXES:
        if tensors and all(name.startswith(prefix) for name in tensors):
            tensors = {name.removeprefix(prefix): value for name, value in tensors.items()}
    return tensors
