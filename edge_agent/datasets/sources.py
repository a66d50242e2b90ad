"""Loads the data set that a user names in `data.source`."""

import importlib.util
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from fleetune.edge_agent.datasets.dataset import Dataset, make_dataset
from fleetune.edge_agent.datasets.formats import FORMATS, DatasetFormat
from fleetune.edge_agent.datasets.npz import from_arrays
from fleetune.edge_agent.datasets.source_options import source_options
from fleetune.protocols.errors import DataError, SettingError
from fleetune.protocols.one_line import without_url
from fleetune.protocols.toml_text import parse_value
from fleetune.protocols.user_code import as_line, user_module

STREAM_KINDS = ("watch", "intake")
_PLACES = ", ".join(f"{kind}:{one.place}" for kind, one in FORMATS.items())
_EXPECTED = f"digits, {_PLACES} or package.module:function"


def load(source: str, folder: Path | None = None) -> Dataset:
    """Load the data set that a `data.source` names.

    A source is `digits`, or `KIND:PATH` with a kind of `formats.FORMATS` (`npz:FILE`, `csv:FILE?OPTIONS`,
    `idx:FOLDER`, ...), or `package.module:function`. A function returns (x, y) or a dict with the arrays of
    `npz.from_arrays`. Options after a question mark are its arguments: `mydata:load?noise=0.1&day=monday`.
    Their values are TOML values or bare words, which are text.

    Args:
        source: the source, as in run.toml.
        folder: folder of relative paths. The current folder comes first, then this one, then the folder in
            the environment variable FLEETUNE_DATA.

    Raises:
        DataError: the source is unknown, or its data are missing or not valid.
    """
    kind, _, rest = source.partition(":")
    if source == "digits":
        return _digits()
    source = without_url(source)
    if kind in STREAM_KINDS:
        raise DataError(f"{source} is a stream; give it to edge-agent run --data (docs/streams.md)")
    if not rest:
        raise DataError(f"data.source `{source}` is not known; expected {_EXPECTED}")
    if kind in FORMATS:
        return _load_format(FORMATS[kind], source, rest, folder)
    name, _, options = rest.partition("?")
    return _call(source, kind, name, arguments(source, options))


def _load_format(dataset_format: DatasetFormat, source: str, rest: str, folder: Path | None) -> Dataset:
    name, _, options = rest.partition("?") if dataset_format.takes_options else (rest, "", "")
    path = _locate(source, Path(name).expanduser(), folder, dataset_format.exists)
    return dataset_format.load(source, path, *([options] if dataset_format.takes_options else []))


def _locate(source: str, path: Path, folder: Path | None, exists: Callable[[Path], bool]) -> Path:
    """Return the path of the data in the folders that `load` names.

    Raises DataError if no folder has them.
    """
    places = [Path(), *([folder] if folder else [])]
    if os.environ.get("FLEETUNE_DATA"):
        places.append(Path(os.environ["FLEETUNE_DATA"]))
    for place in places:
        if exists(place / path):
            return place / path
    looked = " or ".join(str(place.absolute()) for place in places)
    raise DataError(
        f"{source}: there is no {path} in {looked}; set FLEETUNE_DATA to its folder, or give a full path"
    )


def _digits() -> Dataset:
    """Return the 1,797 handwritten digits of scikit-learn, shape (1, 8, 8).

    They are read from scikit-learn's file without importing it, which would take more than a second and 60
    MB.
    """
    found = importlib.util.find_spec("sklearn")
    if found is None:
        raise DataError("digits: this data set needs scikit-learn; install it with: pip install scikit-learn")
    for folder in map(Path, found.submodule_search_locations or ()):
        if (file := folder / "datasets" / "data" / "digits.csv.gz").exists():
            rows = np.loadtxt(file, delimiter=",")
            return make_dataset("digits", rows[:, :-1].reshape(-1, 1, 8, 8) / 16, rows[:, -1].astype(int))
    from sklearn.datasets import load_digits  # this version has the file elsewhere

    bunch = load_digits()
    return make_dataset("digits", (bunch.images / 16)[:, None], bunch.target)


def arguments(source: str, options: str) -> dict[str, Any]:
    """Return the arguments of a user's function. Raises DataError if a value is not a TOML value."""
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
    except Exception as problem:  # so may a user's function
        raise DataError(f"data.source `{source}` failed: {as_line(problem)}") from problem
    return from_python(f"data.source `{source}` returned", source, made)


def from_python(said: str, source: str, made: object) -> Dataset:
    """Return a data set of what a user's code returned.

    Args:
        said: beginning of a message about it.
        source: its name in messages about its content.
        made: a `Dataset`, (x, y), or arrays by name for `npz.from_arrays`.

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
