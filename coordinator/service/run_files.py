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

    def look(self) -> list[RunFile]:
        """The files that are there, by path; of two with the same run.name the later one is wrong."""
        found = {path: mark for path in sorted(self._folder.glob("*.toml")) if (mark := _mark(path))}
        self._known = {path: self._read(path, mark) for path, mark in found.items()}
        names, files = dict[str, Path](), list[RunFile]()
        for one in self._known.values():
            first = names.setdefault(one.name, one.path)
            files.append(one if first == one.path else _named_twice(one, first))
        return files

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
