"""The agent as a systemd service: its files, and the commands that make systemd load them.

Installing again changes nothing. Installing with other options changes those settings and restarts the
service.
"""

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from fleetune.edge_agent.service import environment
from fleetune.protocols.errors import SettingError, StoreError
from fleetune.protocols.files import make_folder, write_atomically
from fleetune.protocols.files import remove as remove_file

UNIT = "fleetune-agent.service"
UNIT_FILE = Path("etc/systemd/system") / UNIT
USER_FILE = Path("etc/sysusers.d/fleetune.conf")
SETTINGS_FILE = Path("etc/fleetune/agent.env")
STATE_FOLDER = Path("var/lib/fleetune")
STEPS_SINCE = 254
_STEPS = ("RestartSteps=", "RestartMaxDelaySec=")
_NEEDED = {"FLEETUNE_FLEET": "--fleet", "FLEETUNE_BROKER": "--broker", "FLEETUNE_SOURCE": "--data"}

Command = tuple[str, ...]


@dataclass(frozen=True)
class File:
    """One of the service's files; `path` is relative to the root of a file system."""

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


def files(
    into: Path, program: Path, values: dict[str, str], *, systemd_version: int | None = None
) -> list[File]:
    """Return the service's files with their wanted content.

    Args:
        into: root of the file system; its agent.env is kept except for `values`.
        program: path of edge-agent, as the service will start it.
        values: variables of agent.env to set.
        systemd_version: keys unknown to this version are left out; None writes all keys.

    Raises:
        SettingError: a required variable is missing, or cannot be written.
        StoreError: the current agent.env cannot be read.
    """
    settings = environment.changed(_present(into), values)
    known = environment.read(settings)
    missing = [option for name, option in _NEEDED.items() if not known.get(name)]
    if missing:
        raise SettingError(f"{', '.join(missing)}: needed, because /{SETTINGS_FILE} does not set it yet")
    unit = _template(UNIT).replace("@PROGRAM@", str(program).replace("%", "%%"))
    if systemd_version is not None and systemd_version < STEPS_SINCE:
        unit = "".join(line for line in unit.splitlines(keepends=True) if not line.startswith(_STEPS))
    return [
        File(USER_FILE, _template("fleetune.sysusers"), 0o644),
        File(SETTINGS_FILE, settings, 0o600),
        File(UNIT_FILE, unit, 0o644),
    ]


def write(into: Path, wanted: list[File]) -> Iterator[tuple[File, bool]]:
    """Write the files that differ; yield each file with True if it was changed.

    Raises:
        StoreError: a file cannot be written.
    """
    for file in wanted:
        changes = not file.is_there(into)
        if changes:
            _replace(into / file.path, file.content, file.mode)
        yield file, changes


def activation(into: Path, *, changed: bool) -> list[Command]:
    """Return the commands to run after the files were written.

    `restart` does not wait, because an agent may need long to reach its broker.
    """
    if into != Path("/"):
        # systemd creates the user when that system boots
        return [("systemctl", f"--root={into}", "enable", UNIT)]
    commands: list[Command] = [
        ("systemd-sysusers", f"/{USER_FILE}"),
        ("systemctl", "daemon-reload"),
        ("systemctl", "enable", UNIT),
    ]
    return [*commands, ("systemctl", "--no-block", "restart" if changed else "start", UNIT)]


def removal(into: Path) -> list[Command]:
    """Return the commands to run before the files are removed."""
    if into != Path("/"):
        return [("systemctl", f"--root={into}", "disable", UNIT)]
    return [("systemctl", "disable", "--now", UNIT)]


def remove(into: Path, paths: list[Path]) -> Iterator[Path]:
    """Remove these files; yield those that existed.

    Raises:
        StoreError: a file cannot be removed.
    """
    for path in paths:
        if (into / path).exists():
            remove_file(into / path)
            yield path


def settings(into: Path) -> dict[str, str]:
    """Return the variables of agent.env.

    Raises:
        StoreError: the file cannot be read.
        SettingError: a line is wrong.
    """
    text = _present(into)
    if not text:
        raise StoreError(f"there is no {into / SETTINGS_FILE}; see edge-agent service install --help")
    return environment.read(text)


def program(executable: Path = Path(sys.executable)) -> Path:
    """Return the edge-agent next to this Python, which may be a link into a home folder (pyenv, uv).

    Raises:
        SettingError: there is no such program, or the service's user cannot start it.
    """
    found = executable.with_name("edge-agent")
    if not found.is_file():
        raise SettingError(f"there is no {found}; install Fleetune into this environment, see docs/install")
    for needed in (found, executable.resolve()):
        closed = [folder for folder in needed.parents if not folder.stat().st_mode & 0o001]
        if closed:
            raise SettingError(
                f"{needed}: user fleetune may not enter {closed[-1]}; install into a folder that is open to "
                "all users, like /opt/fleetune, with the system's Python"
            )
    return found


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


def _present(into: Path) -> str:
    try:
        return (into / SETTINGS_FILE).read_text(encoding="utf-8")
    except FileNotFoundError:
        return ""
    except (OSError, UnicodeDecodeError) as problem:
        raise StoreError(f"cannot read {into / SETTINGS_FILE}: {problem}") from None


def _template(name: str) -> str:
    return resources.files("fleetune.edge_agent.service").joinpath(name).read_text(encoding="utf-8")


def _replace(path: Path, content: str, mode: int) -> None:
    """Write a file whose permissions never exceed `mode`, not even while it is written."""
    try:
        make_folder(path.parent, private=False)  # other files lie there too, e.g. the authority's
        write_atomically(path, content.encode(), mode=mode)
    except StoreError as problem:
        raise StoreError(f"{problem}; sudo may help") from None
