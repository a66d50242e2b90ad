"""The registry of data set formats. A new format takes one file with its loader and one line in `FORMATS`."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from fleetune.edge_agent.datasets import csv_files
from fleetune.edge_agent.datasets.audio import load_audio
from fleetune.edge_agent.datasets.cifar import load_cifar
from fleetune.edge_agent.datasets.csv_table import load_csv
from fleetune.edge_agent.datasets.dataset import Dataset
from fleetune.edge_agent.datasets.har import load_har
from fleetune.edge_agent.datasets.idx import idx_files_exist, load_idx
from fleetune.edge_agent.datasets.npz import load_npz


@dataclass(frozen=True)
class DatasetFormat:
    """One format, written as `KIND:PATH` in `data.source`.

    Attributes:
        place: whether the path is that of a file or of a folder.
        load: called with the source (for messages), the path and, if `takes_options`, the options.
        takes_options: True if options may follow the path, as in `csv:FILE?label=kwh`.
        exists: True if there is such data at a path.
    """

    place: Literal["FILE", "FOLDER"]
    load: Callable[..., Dataset]
    takes_options: bool = False
    exists: Callable[[Path], bool] = Path.exists


FORMATS: dict[str, DatasetFormat] = {
    "idx": DatasetFormat("FOLDER", load_idx, exists=idx_files_exist),
    "cifar": DatasetFormat("FOLDER", load_cifar),
    "har": DatasetFormat("FOLDER", load_har),
    "npz": DatasetFormat("FILE", load_npz),
    "csv": DatasetFormat("FILE", load_csv, takes_options=True, exists=csv_files.exists),
    "audio": DatasetFormat("FOLDER", load_audio, takes_options=True),
}
