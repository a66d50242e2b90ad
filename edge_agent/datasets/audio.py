"""Sound files, `audio:FOLDER?rate=16000`: a file a sample, as log-mel features (`datasets.log_mel`).

WAV files of whole numbers are read by Python itself; all others (FLAC, OGG, MP3, WAV of floats) by soundfile,
which is imported where such a file is read, and nowhere else.
"""

import wave
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fleetune.edge_agent.datasets.dataset import Dataset, dataset
from fleetune.edge_agent.datasets.log_mel import LogMel, Sound, log_mel, log_mel_options
from fleetune.protocols.errors import DataError
from fleetune.protocols.one_line import flat

SOUNDS = frozenset({".wav", ".flac", ".ogg", ".mp3"})
_PARTS = ("label", "group")


class NeedsSoundfile(DataError):  # noqa: N818 - it reports what is missing
    """What reads such files is not installed here: `str()` is the line that says how to."""


def load_audio(source: str, folder: Path, options: str) -> Dataset:
    """Every sound in a folder and the folders in it, in the order of their names.

    A sound's label is the folder it lies in, right below `folder`; with `names=label,group,take` it is that
    part of the file's name, whose parts have underscores between: the recordings of FSDD are called so.

    Args:
        source: as the user wrote it, for messages.
        folder: in which perhaps classes.txt lists the classes, a line each; else labels are their numbers.
        options: those of `LogMel`, and `names`.

    Raises:
        DataError: in one line, what is wrong with the options, a file or its label.
    """
    settings, rest = log_mel_options(source, options)
    names = [name.strip() for name in rest.pop("names", "").split(",") if name.strip()]
    if rest:
        raise DataError(f"{source}: no option {min(rest)!r}; there are names and those of docs/data.md")
    if names and "label" not in names:
        raise DataError(f"{source}: names must tell which part of a file's name is the label")
    paths = [path for path in sorted(folder.rglob("*")) if path.suffix.lower() in SOUNDS and path.is_file()]
    if not paths:
        raise DataError(f"{source}: no sounds in {folder}; expected {', '.join(sorted(SOUNDS))}")
    parts = [_parts(source, folder, path, names) for path in paths]
    classes = _classes(folder)
    x = np.empty((len(paths), *settings.shape), np.float32)
    for place, path in enumerate(paths):
        x[place] = sound_features(path, settings)
    y = [_number(source, path, part["label"], classes) for path, part in zip(paths, parts, strict=True)]
    group = [part["group"] for part in parts] if "group" in names else None
    return dataset(source, x, np.array(y, np.int64), group=group)


def sound_features(path: Path, settings: LogMel) -> NDArray[np.float32]:
    """A file's features. Raises as `read_sound`."""
    return log_mel(read_sound(path, settings.rate), settings)


def read_sound(path: Path, rate: int) -> Sound:
    """A file's amplitudes in [-1, 1], shape (n,): the mean of its channels.

    Args:
        path: of the file.
        rate: that it must have, Hz.

    Raises:
        DataError: it is damaged, holds nothing, or has another rate; NeedsSoundfile.
    """
    found = _wave(path) if path.suffix.lower() == ".wav" else None
    channels, found_rate = _with_soundfile(path) if found is None else found
    if found_rate != rate:
        raise DataError(f"{path}: {found_rate} Hz, not {rate}; convert it, or say ?rate={found_rate}")
    if not channels.size:
        raise DataError(f"{path}: there is no sound in it")
    mean: Sound = channels.mean(1, dtype=np.float32)
    return mean


def _wave(path: Path) -> tuple[NDArray[np.float32], int] | None:
    """Amplitudes, shape (n, channels), and their rate; None: another kind of WAV file."""
    try:
        with wave.open(str(path)) as file:
            width, channels = file.getsampwidth(), file.getnchannels()
            data, rate = file.readframes(file.getnframes()), file.getframerate()
    except (wave.Error, EOFError):
        return None
    whole = np.frombuffer(data, np.uint8)[: len(data) // (width * channels) * width * channels]
    return _amplitudes(whole.reshape(-1, width)).reshape(-1, channels), rate


def _amplitudes(numbers: NDArray[np.uint8]) -> NDArray[np.float32]:
    """Little-endian whole numbers, shape (n, bytes), as amplitudes; those of one byte are above 0."""
    width = numbers.shape[1]
    if width == 1:
        return (numbers[:, 0].astype(np.float32) - np.float32(128)) / np.float32(128)
    wide = np.zeros((len(numbers), 4), np.uint8)
    wide[:, 4 - width :] = numbers  # in the upper bytes: the sign is in place
    return (wide.view("<i4")[:, 0] / 2.0**31).astype(np.float32)


def _with_soundfile(path: Path) -> tuple[NDArray[np.float32], int]:
    try:
        import soundfile
    except (ImportError, OSError):  # OSError: its library is not there
        words = f"{path}: only WAV files of whole numbers are read without soundfile: pip install soundfile"
        raise NeedsSoundfile(words) from None
    try:
        data, rate = soundfile.read(path, dtype="float32", always_2d=True)
    except Exception as problem:  # noqa: BLE001 - damaged files raise nearly anything
        raise DataError(f"{path}: no readable sound ({flat(problem)[:200]})") from None
    return data, int(rate)


def _parts(source: str, folder: Path, path: Path, names: list[str]) -> dict[str, str]:
    """A file's label, and perhaps its group."""
    if not names:
        inside = path.relative_to(folder).parts[:-1]
        if not inside:
            raise DataError(f"{source}: {path.name} lies in no folder of a class; see docs/data.md")
        return {"label": inside[0]}
    found = path.stem.split("_")
    if len(found) != len(names):
        raise DataError(f"{source}: {path.name} has {len(found)} parts, names has {len(names)}")
    return {name: part for name, part in zip(names, found, strict=True) if name in _PARTS}


def _classes(folder: Path) -> dict[str, int]:
    return {name: number for number, name in enumerate(_lines(folder / "classes.txt"))}


def _lines(path: Path) -> Iterator[str]:
    if path.exists():
        yield from (line.strip() for line in path.read_text(encoding="utf-8").splitlines() if line.strip())


def _number(source: str, path: Path, label: str, classes: dict[str, int]) -> int:
    if label in classes:
        return classes[label]
    if label.isdecimal():
        return int(label)
    raise DataError(
        f"{source}: {path}: {label!r} is no number, and classes.txt in the folder does not list it"
    )
