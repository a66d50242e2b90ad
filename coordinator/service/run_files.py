"""The run.toml files of a service, read when they change; a wrong one is one line, and harms only itself."""

from dataclasses import dataclass
from pathlib import Path

from fleetune.protocols.errors import SettingError
from fleetune.protocols.one_line import unexpected
from fleetune.protocols.settings.run_settings import RunSettings
from fleetune.protocols.settings.run_toml import read_run

Mark = tuple[int, int, int]


@dataclass(frozen=True)
class RunFile:
    """One file as it was read last.

    Attributes:
        path: of it.
        mark: what changes when it is written.
        settings: None: it is wrong.
        problem: what is wrong with it, in one line; "" for nothing.
    """

    path: Path
    mark: Mark
    settings: RunSettings | None
    problem: str = ""

    @property
    def name(self) -> str:
        """Of its run; of a file that is wrong, its own."""
        return self.path.stem if self.settings is None else self.settings.run.name

    @property
    def fleet(self) -> str:
        """That its run is for."""
        return self.name if self.settings is None else self.settings.run.fleet or self.name


class RunFiles:
    """Those in one folder, without the folders in it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._known: dict[Path, RunFile] = {}
        self._holders: dict[str, Path] = {}  # of each run.name, the file that has it

    def look(self) -> list[RunFile]:
        """The files that are there, by path. Of several with one run.name, all are wrong but the one that had
        the name at the last look, else the first.
        """
        found = {path: mark for path in sorted(self._folder.glob("*.toml")) if (mark := _mark(path))}
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

    def _read(self, path: Path, mark: Mark) -> RunFile:
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


def _mark(path: Path) -> Mark | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size
