"""From what a user writes as `data.source` to its samples."""

import importlib.util
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from fleetune.edge_agent.datasets.audio import load_audio
from fleetune.edge_agent.datasets.cifar import load_cifar
from fleetune.edge_agent.datasets.csv_table import load_table
from fleetune.edge_agent.datasets.dataset import Dataset, make_dataset
from fleetune.edge_agent.datasets.har import load_har
from fleetune.edge_agent.datasets.idx import load_idx
from fleetune.edge_agent.datasets.npz import from_arrays, load_npz
from fleetune.edge_agent.datasets.source_options import source_options
from fleetune.protocols.errors import DataError, SettingError
from fleetune.protocols.one_line import without_url
from fleetune.protocols.toml_text import parse_value
from fleetune.protocols.user_code import as_line, user_module

_FORMATS = {"idx": load_idx, "cifar": load_cifar, "har": load_har, "npz": load_npz}
_STREAMS = {"watch", "intake"}
_WITH_OPTIONS = {"csv": load_table, "audio": load_audio}
KINDS = frozenset({*_FORMATS, *_WITH_OPTIONS})
"""What may stand before the colon of a source that is a file or a folder."""
_FILES = "idx:FOLDER, cifar:FOLDER, har:FOLDER, npz:FILE, csv:FILE, audio:FOLDER"
_EXPECTED = f"digits, {_FILES} or package.module:function"


def load(source: str, folder: Path | None = None) -> Dataset:
    """Load the samples of `digits`, `idx:FOLDER`, `cifar:FOLDER`, `har:FOLDER`, `npz:FILE`,
    `csv:FILE?OPTIONS` (see `edge_agent.datasets.csv_table`), `audio:FOLDER?OPTIONS` (see
    `edge_agent.datasets.audio`) or `package.module:function`.

    A function returns (x, y) or a dict of the arrays of `npz.from_arrays`. It is called with what stands
    behind a question mark, values as in TOML, bare words are text: `mydata:load?noise=0.1&day=monday`.

    Args:
        source: as in run.toml.
        folder: where a relative path is looked for after the current folder, and before the folder that the
            environment variable FLEETUNE_DATA names.

    Raises:
        DataError: in one line, what is wrong with the source.
    """
    kind, _, rest = source.partition(":")
    if source == "digits":
        return _digits()
    source = without_url(source)
    if kind in _STREAMS:
        raise DataError(f"{source}: data that grow are for edge-agent run --data; docs/streams.md")
    if not rest:
        raise DataError(f"data.source `{source}` is not known; expected {_EXPECTED}")
    if kind in _WITH_OPTIONS:
        name, _, options = rest.partition("?")
        return _WITH_OPTIONS[kind](source, _locate(source, Path(name).expanduser(), folder), options)
    if kind in _FORMATS:
        return _FORMATS[kind](source, _locate(source, Path(rest).expanduser(), folder))
    name, _, options = rest.partition("?")
    return _call(source, kind, name, _arguments(source, options))


def _locate(source: str, path: Path, folder: Path | None) -> Path:
    """The first place where there is such a file or folder, or IDX files that begin with its name."""
    places = [Path(), *([folder] if folder else [])]
    if os.environ.get("FLEETUNE_DATA"):
        places.append(Path(os.environ["FLEETUNE_DATA"]))
    for place in places:
        candidate = place / path
        if candidate.exists() or any(candidate.parent.glob(f"{candidate.name}-*idx*")):
            return candidate
    looked = " or ".join(str(place.absolute()) for place in places)
    raise DataError(f"{source}: there is no {path} in {looked}; FLEETUNE_DATA may name another folder")


def _digits() -> Dataset:
    """The 1,797 handwritten digits, 1 x 8 x 8, that come with scikit-learn.

    Its file is read as it reads it, without importing it: that takes more than a second and 60 MB.
    """
    found = importlib.util.find_spec("sklearn")
    if found is None:
        raise DataError("digits: needs scikit-learn; install it with: pip install scikit-learn")
    for folder in map(Path, found.submodule_search_locations or ()):
        if (file := folder / "datasets" / "data" / "digits.csv.gz").exists():
            rows = np.loadtxt(file, delimiter=",")
            return make_dataset("digits", rows[:, :-1].reshape(-1, 1, 8, 8) / 16, rows[:, -1].astype(int))
    from sklearn.datasets import load_digits  # another version may have it elsewhere

    bunch = load_digits()
    return make_dataset("digits", (bunch.images / 16)[:, None], bunch.target)


def _arguments(source: str, options: str) -> dict[str, Any]:
    """Raises DataError: see `source_options`; or a value is no TOML value."""
    given = source_options(f"data.source `{source}`", options)
    try:
        return {name: parse_value(text) for name, text in given.items()}
    except SettingError as problem:
        raise DataError(f"data.source `{source[:100]}`: {problem}") from None


def _call(source: str, module: str, function: str, arguments: Mapping[str, Any]) -> Dataset:
    try:
        make = getattr(user_module(module), function)
    except Exception as problem:  # a user's file may raise anything
        raise DataError(f"data.source `{source}`: {as_line(problem)}; expected {_EXPECTED}") from problem
    try:
        made = make(**arguments)
    except Exception as problem:  # likewise
        raise DataError(f"data.source `{source}` failed: {as_line(problem)}") from problem
    return from_python(f"data.source `{source}` returned", source, made)


def from_python(said: str, source: str, made: object) -> Dataset:
    """What a user's code has for samples, as a data set.

    Args:
        said: what a message about it begins with.
        source: what it is called in messages about its content.
        made: a `Dataset`, (x, y), or the arrays of `npz.from_arrays` by name.

    Raises:
        DataError: it is none of these, or its arrays do not fit together.
    """
    if isinstance(made, Dataset):
        return made
    if isinstance(made, Mapping):
        return from_arrays(source, made)
    if isinstance(made, tuple) and len(made) == 2:
        return make_dataset(source, *made)
    raise DataError(f"{said} {type(made).__name__}; expected (x, y) or a dict of arrays")
