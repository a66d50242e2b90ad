"""Reads the run.toml files of a service. A file with an error affects only its own run."""

from dataclasses import dataclass
from pathlib import Path

from fleetune.protocols.errors import SettingError
from fleetune.protocols.files import FileMark, mark_of
from fleetune.protocols.one_line import unexpected
from fleetune.protocols.settings.run_settings import RunSettings
from fleetune.protocols.settings.run_toml import read_run


@dataclass(frozen=True)
class RunFile:
    """A run.toml file as the service last read it.

    Attributes:
        path: the path of the file.
        mark: inode, modification time and size; a difference shows that the file was written.
        settings: the settings of the run; None if the file has an error.
        problem: the file's error in one line; "" if the file is valid.
    """

    path: Path
    mark: FileMark
    settings: RunSettings | None
    problem: str = ""

    @property
    def name(self) -> str:
        """The run's name; for a file with an error, the file's name."""
        return self.path.stem if self.settings is None else self.settings.run.name

    @property
    def fleet(self) -> str:
        """The name of the fleet that trains the run."""
        return self.name if self.settings is None else self.settings.run.fleet or self.name


class RunFiles:
    """The run.toml files directly in a folder, without subfolders."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._known: dict[Path, RunFile] = {}
        self._holders: dict[str, Path] = {}  # the file that owns each run.name

    def look(self) -> list[RunFile]:
        """Read new and changed files, and return all files by ascending path.

        If several files have the same run.name, only one is valid: the one that was valid before, else the
        first.
        """
        found = {path: mark for path in sorted(self._folder.glob("*.toml")) if (mark := mark_of(path))}
        self._known = {path: self._read(path, mark) for path, mark in found.items()}
        holders = dict[str, Path]()
        for one in self._known.values():
            if one.path == self._holders.get(one.name):
                holders[one.name] = one.path
        for one in self._known.values():
            holders.setdefault(one.name, one.path)
        self._holders = holders
        return [
            one if holders[one.name] == one.path else _named_twice(one, holders[one.name])
            for one in self._known.values()
        ]

    def _read(self, path: Path, mark: FileMark) -> RunFile:
        known = self._known.get(path)
        if known is not None and known.mark == mark:
            return known
        try:
            return RunFile(path, mark, read_run(path))
        except SettingError as problem:
            return RunFile(path, mark, None, str(problem))
        except Exception as fault:  # noqa: BLE001 - whatever a file brings about, the other runs go on
            return RunFile(path, mark, None, f"{path}: {unexpected(fault)}")


def _named_twice(one: RunFile, first: Path) -> RunFile:
    problem = f'{one.path}: run.name = "{one.name}" is that of {first.name} already'
    return RunFile(one.path, one.mark, None, one.problem or problem)
