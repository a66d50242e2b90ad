"""A program as a systemd service: its files, and the commands that make systemd load them.

Installing again changes nothing. Installing with other options changes those settings and restarts the
service.
"""

import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path

from fleetune.protocols.errors import SettingError, StoreError
from fleetune.protocols.files import make_folder, write_atomically
from fleetune.protocols.files import remove as remove_file
from fleetune.protocols.systemd import environment

STEPS_SINCE = 254
_STEPS = ("RestartSteps=", "RestartMaxDelaySec=")

Command = tuple[str, ...]


@dataclass(frozen=True)
class Service:
    """A program of Fleetune that systemd can run. Paths are relative to the root of a file system.

    Attributes:
        program: name of the program, such as `edge-agent`.
        name: the service's name without `fleetune-`, such as `agent`.
        user: the service's user; its home is the state folder.
        templates: the package that holds the files `fleetune-NAME.service` and `USER.sysusers`.
        needed: variables without which the service cannot start, with the option that sets each.
    """

    program: str
    name: str
    user: str
    templates: str
    needed: Mapping[str, str] = field(default_factory=dict)

    @property
    def unit(self) -> str:
        return f"fleetune-{self.name}.service"

    @property
    def unit_file(self) -> Path:
        return Path("etc/systemd/system") / self.unit

    @property
    def user_file(self) -> Path:
        return Path("etc/sysusers.d") / f"{self.user}.conf"

    @property
    def settings_file(self) -> Path:
        return Path("etc/fleetune") / f"{self.name}.env"

    @property
    def state_folder(self) -> Path:
        return Path("var/lib") / self.user

    def executable(self, python: Path = Path(sys.executable)) -> Path:
        """Return the program next to this Python, which may be a link into a home folder (pyenv, uv).

        Raises:
            SettingError: there is no such program, or the service's user cannot start it.
        """
        found = python.with_name(self.program)
        if not found.is_file():
            raise SettingError(
                f"there is no {found}; install Fleetune into this environment, see docs/install"
            )
        for needed in (found, python.resolve()):
            closed = [folder for folder in needed.parents if not folder.stat().st_mode & 0o001]
            if closed:
                raise SettingError(
                    f"{needed}: user {self.user} may not enter {closed[-1]}; install into a folder that is"
                    " open to all users, like /opt/fleetune, with the system's Python"
                )
        return found

    def settings(self, into: Path) -> dict[str, str]:
        """Return the variables of the settings file.

        Raises:
            StoreError: the file cannot be read.
            SettingError: a line is wrong.
        """
        text = self._present(into)
        if not text:
            raise StoreError(
                f"there is no {into / self.settings_file}; see {self.program} service install --help"
            )
        return environment.read(text, self.settings_file.name)

    def files(
        self, into: Path, executable: Path, values: Mapping[str, str], *, systemd_version: int | None = None
    ) -> list["File"]:
        """Return the service's files with their wanted content.

        Args:
            into: root of the file system; its settings file is kept except for `values`.
            executable: path of the program, as the service will start it.
            values: variables of the settings file to set.
            systemd_version: keys unknown to this version are left out; None writes all keys.

        Raises:
            SettingError: a required variable is missing, or cannot be written.
            StoreError: the current settings file cannot be read.
        """
        name = self.settings_file.name
        settings = environment.changed(self._present(into) or self._header, dict(values), name)
        known = environment.read(settings, name)
        missing = [option for variable, option in self.needed.items() if not known.get(variable)]
        if missing:
            raise SettingError(
                f"{', '.join(missing)}: needed, because /{self.settings_file} does not set it yet"
            )
        unit = self._template(self.unit).replace("@PROGRAM@", str(executable).replace("%", "%%"))
        if systemd_version is not None and systemd_version < STEPS_SINCE:
            unit = "".join(line for line in unit.splitlines(keepends=True) if not line.startswith(_STEPS))
        return [
            File(self.user_file, self._template(f"{self.user}.sysusers"), 0o644),
            File(self.settings_file, settings, 0o600),
            File(self.unit_file, unit, 0o644),
        ]

    def activation(self, into: Path, *, changed: bool) -> list[Command]:
        """Return the commands to run after the files were written.

        `restart` does not wait, because a service may need long until it is ready.
        """
        if into != Path("/"):
            # systemd creates the user when that system boots
            return [("systemctl", f"--root={into}", "enable", self.unit)]
        return [
            ("systemd-sysusers", f"/{self.user_file}"),
            ("systemctl", "daemon-reload"),
            ("systemctl", "enable", self.unit),
            ("systemctl", "--no-block", "restart" if changed else "start", self.unit),
        ]

    def removal(self, into: Path) -> list[Command]:
        """Return the commands to run before the files are removed."""
        if into != Path("/"):
            return [("systemctl", f"--root={into}", "disable", self.unit)]
        return [("systemctl", "disable", "--now", self.unit)]

    @property
    def _header(self) -> str:
        return (
            f"# Settings of {self.unit}; `{self.program} service install` changes the lines of its options.\n"
        )

    def _present(self, into: Path) -> str:
        path = into / self.settings_file
        try:
            return path.read_text(encoding="utf-8")
        except FileNotFoundError:
            return ""
        except (OSError, UnicodeDecodeError) as problem:
            raise StoreError(f"cannot read {path}: {problem}") from None

    def _template(self, name: str) -> str:
        return resources.files(self.templates).joinpath(name).read_text(encoding="utf-8")


@dataclass(frozen=True)
class File:
    """One of a service's files; `path` is relative to the root of a file system."""

    path: Path
    content: str
    mode: int

    def is_there(self, into: Path) -> bool:
        """True if the file exists with this content and mode."""
        try:
            there = into / self.path
            return there.read_text(encoding="utf-8") == self.content and (
                there.stat().st_mode & 0o777 == self.mode
            )
        except (OSError, UnicodeDecodeError):
            return False


def write(into: Path, wanted: Iterable[File]) -> Iterator[tuple[File, bool]]:
    """Write the files that differ; yield each file with True if it was changed.

    Raises:
        StoreError: a file cannot be written.
    """
    for file in wanted:
        changes = not file.is_there(into)
        if changes:
            _replace(into / file.path, file.content, file.mode)
        yield file, changes


def remove(into: Path, paths: Iterable[Path]) -> Iterator[Path]:
    """Remove these files; yield those that existed.

    Raises:
        StoreError: a file cannot be removed.
    """
    for path in paths:
        if (into / path).exists():
            remove_file(into / path)
            yield path


def systemd_version() -> int | None:
    """Return the installed systemd's version; None if it does not report one."""
    try:
        words = run(("systemctl", "--version")).split()
    except StoreError:
        return None
    return int(words[1]) if len(words) > 1 and words[1].isdecimal() else None


def run(command: Command) -> str:
    """Run a command, and return its output.

    Raises:
        StoreError: the command fails.
    """
    try:
        done = subprocess.run(command, capture_output=True, check=False, text=True)  # noqa: S603
    except OSError as problem:
        raise StoreError(f"{command[0]}: {problem.strerror}; is this a system with systemd?") from None
    if done.returncode:
        said = " ".join((done.stderr or done.stdout).split())
        raise StoreError(f"{' '.join(command)} failed: {said or f'exit code {done.returncode}'}")
    return done.stdout


def _replace(path: Path, content: str, mode: int) -> None:
    """Write a file whose permissions never exceed `mode`, not even while it is written."""
    try:
        make_folder(path.parent, private=False)  # other files lie there too, e.g. the authority's
        write_atomically(path, content.encode(), mode=mode)
    except StoreError as problem:
        raise StoreError(f"{problem}; sudo may help") from None
