"""WAV files, `audio:FOLDER?rate=16000`: each file is one sample of log-mel features (`datasets.log_mel`).

Python's `wave` module reads WAV files of whole numbers. FLAC, OGG and MP3 files, and WAV files of floats, are
refused with the command that converts them.
"""

import os
import wave
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from fleetune.edge_agent.datasets.dataset import Dataset, make_dataset
from fleetune.edge_agent.datasets.log_mel import LogMel, Sound, log_mel, log_mel_options
from fleetune.protocols.errors import DataError, FleetuneError
from fleetune.protocols.input_files import check_stop, memory_limit_bytes, open_input, read_text_input
from fleetune.protocols.one_line import flat

SOUND = ".wav"
OTHER_SOUNDS = frozenset({".flac", ".ogg", ".mp3"})
CLASSES = "classes.txt"
MAX_SOUND_FILE_BYTES = 2**32  # size of a file; only the first seconds are read
_BLOCK_BYTES = 2**20
_PARTS = ("label", "group")


def load_audio(source: str, folder: Path, options: str) -> Dataset:
    """Load every WAV file in a folder and its subfolders, in the order of their names.

    A sound's label is the name of its folder right below `folder`. With `names=label,group,take` it is that
    part of the file's name, whose parts are separated by underscores. The recordings of FSDD are named so.

    Args:
        source: the source as the user wrote it, for messages.
        folder: the folder. Its file classes.txt may list the classes, one per line. Without it, labels are
            numbers.
        options: options of `LogMel`, and `names`.

    Raises:
        DataError: an option, a file or its label is wrong, or a sound is no WAV file.
    """
    settings, rest = log_mel_options(source, options)
    names = [name.strip() for name in rest.pop("names", "").split(",") if name.strip()]
    if rest:
        raise DataError(f"{source}: unknown option {min(rest)!r}; use names, or an option of docs/data.md")
    if names and "label" not in names:
        raise DataError(f"{source}: names has no part label; add it, as in names=label,group")
    files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    for path in files:
        if path.suffix.lower() in OTHER_SOUNDS:
            raise DataError(
                f"{source}: {path} is no WAV file; convert it with {convert_command(settings.rate)},"
                " and move the original out of the folder"
            )
    paths = [path for path in files if path.suffix.lower() == SOUND]
    if not paths:
        raise DataError(f"{source}: {folder} has no WAV file; put sounds into it whose names end in {SOUND}")
    parts = [_parts(source, folder, path, names) for path in paths]
    classes = {name: number for number, name in enumerate(class_names(folder))}
    x = np.empty((len(paths), *settings.shape), np.float32)
    for place, path in enumerate(paths):
        x[place] = sound_features(path, settings)
    y = [_number(source, path, part["label"], classes) for path, part in zip(paths, parts, strict=True)]
    group = [part["group"] for part in parts] if "group" in names else None
    return make_dataset(source, x, np.array(y, np.int64), group=group)


def convert_command(rate: int) -> str:
    """Return the command that converts a sound to a WAV file of this sampling rate in Hz."""
    return f"ffmpeg -i FILE -ar {rate} -c:a pcm_s16le FILE.wav"


def sound_features(path: Path, settings: LogMel) -> NDArray[np.float32]:
    """Log-mel features of a WAV file. Raises as `read_sound`."""
    return log_mel(read_sound(path, settings.rate, settings.length), settings)


def read_sound(path: Path, rate: int, length: int | None = None) -> Sound:
    """Read a WAV file as amplitudes in [-1, 1], shape (n,). Several channels are averaged.

    Args:
        path: path of the file.
        rate: sampling rate that it must have, in Hz.
        length: number of amplitudes to read at most; None for all.

    Raises:
        DataError: the file is no WAV file of whole numbers, is empty, or has another sampling rate.
    """
    most = memory_limit_bytes() // 4 if length is None else length
    with open_input(path, MAX_SOUND_FILE_BYTES) as content:
        try:
            sound = _amplitudes_in(path, content, rate, most)
        except FleetuneError:
            raise
        except Exception as problem:  # noqa: BLE001 - a chunk that ends too early is a RuntimeError
            words = flat(problem)[:200] or type(problem).__name__
            raise DataError(
                f"{path}: not a WAV file of whole numbers ({words}); copy it again, or convert it with"
                f" {convert_command(rate)}"
            ) from None
    if not sound.size:
        raise DataError(f"{path}: the file has no sound in it; remove it")
    return sound


def _check_rate(path: Path, found: int, rate: int) -> None:
    if found != rate:
        raise DataError(
            f"{path}: its sampling rate is {found} Hz, not {rate}; convert it, or use ?rate={found}"
        )


def _amplitudes_in(path: Path, content: BinaryIO, rate: int, length: int) -> Sound:
    """Return the first `length` amplitudes of a WAV file, averaged over channels. They are read in blocks."""
    file = wave.open(content)  # noqa: SIM115 - it only reads `content`, which its owner closes
    width, channels = file.getsampwidth(), file.getnchannels()
    if not 1 <= width <= 4:
        raise DataError(f"{path}: its samples have {width} bytes each; expected 1 to 4")
    _check_rate(path, file.getframerate(), rate)
    at_once = max(1, _BLOCK_BYTES // (width * channels))
    blocks, left = [np.zeros(0, np.float32)], min(length, file.getnframes())
    while left > 0:
        check_stop()
        data = np.frombuffer(file.readframes(min(left, at_once)), np.uint8)
        whole = data[: data.size // (width * channels) * width * channels]
        if not whole.size:
            break
        amplitudes = _amplitudes(whole.reshape(-1, width)).reshape(-1, channels)
        blocks.append(amplitudes.mean(1, dtype=np.float32))
        left -= len(amplitudes)
    return np.concatenate(blocks)


def _amplitudes(numbers: NDArray[np.uint8]) -> NDArray[np.float32]:
    """Convert little-endian whole numbers, shape (n, bytes), to amplitudes. One-byte numbers are unsigned."""
    width = numbers.shape[1]
    if width == 1:
        return (numbers[:, 0].astype(np.float32) - np.float32(128)) / np.float32(128)
    wide = np.zeros((len(numbers), 4), np.uint8)
    wide[:, 4 - width :] = numbers  # into the upper bytes, so that the sign is in place
    return (wide.view("<i4")[:, 0] / 2.0**31).astype(np.float32)


def _parts(source: str, folder: Path, path: Path, names: list[str]) -> dict[str, str]:
    """Label of a file, and its group if its name has one."""
    if not names:
        inside = path.relative_to(folder).parts[:-1]
        if not inside:
            raise DataError(f"{source}: {path.name} is not in the folder of a class; see docs/data.md")
        return {"label": inside[0]}
    found = path.stem.split("_")
    if len(found) != len(names):
        raise DataError(f"{source}: the name of {path.name} has {len(found)} parts; names lists {len(names)}")
    return {name: part for name, part in zip(names, found, strict=True) if name in _PARTS}


def class_names(folder: Path) -> list[str]:
    """Names of the classes 0, 1, ... in a folder's classes.txt; empty: there is no such file.

    Raises:
        DataError: the file cannot be read, see `read_text_input`.
    """
    path = folder / CLASSES
    if not os.path.lexists(path):
        return []
    return [line.strip() for line in read_text_input(path).splitlines() if line.strip()]


def _number(source: str, path: Path, label: str, classes: dict[str, int]) -> int:
    if label in classes:
        return classes[label]
    if label.isdecimal():
        return int(label)
    raise DataError(
        f"{source}: {path}: label {label!r} is not a number, and classes.txt in the folder does not list it"
    )
