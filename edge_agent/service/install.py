"""The agent as a systemd service: its files, and the commands that make systemd know them.

Installing twice changes nothing; installing with other options changes what these say and restarts it.
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
    """One of the files that the service consists of; `path` is below the root of a file system."""

    path: Path
    content: str
    mode: int

    def is_there(self, into: Path) -> bool:
        """Whether it lies there, with this content and mode."""
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
    """The service's files as they should be.

    Args:
        into: the file system they belong to, whose present agent.env is kept but for `values`.
        program: edge-agent, as the service will start it.
        values: variables of agent.env to set.
        systemd_version: keys that it does not know are left out; None: not known, all stay.

    Raises:
        SettingError: a variable that is needed is in neither, or cannot be written.
        StoreError: the present agent.env cannot be read.
    """
    settings = environment.changed(_present(into), values)
    known = environment.read(settings)
    missing = [option for name, option in _NEEDED.items() if not known.get(name)]
    if missing:
        raise SettingError(f"{', '.join(missing)}: needed, as /{SETTINGS_FILE} does not say it yet")
    unit = _template(UNIT).replace("@PROGRAM@", str(program).replace("%", "%%"))
    if systemd_version is not None and systemd_version < STEPS_SINCE:
        unit = "".join(line for line in unit.splitlines(keepends=True) if not line.startswith(_STEPS))
    return [
        File(USER_FILE, _template("fleetune.sysusers"), 0o644),
        File(SETTINGS_FILE, settings, 0o600),
        File(UNIT_FILE, unit, 0o644),
    ]


def write(into: Path, wanted: list[File]) -> Iterator[tuple[File, bool]]:
    """Write what is not as it should be; tell of each file whether it had to be changed.

    Raises:
        StoreError: one cannot be written.
    """
    for file in wanted:
        changes = not file.is_there(into)
        if changes:
            _replace(into / file.path, file.content, file.mode)
        yield file, changes


def activation(into: Path, *, changed: bool) -> list[Command]:
    """The commands to run after the files were written.

    `restart` does not wait: an agent may be long in finding its broker.
    """
    if into != Path("/"):
        return [("systemctl", f"--root={into}", "enable", UNIT)]  # the user is made when that system boots
    commands: list[Command] = [
        ("systemd-sysusers", f"/{USER_FILE}"),
        ("systemctl", "daemon-reload"),
        ("systemctl", "enable", UNIT),
    ]
    return [*commands, ("systemctl", "--no-block", "restart" if changed else "start", UNIT)]


def removal(into: Path) -> list[Command]:
    """The commands to run before the files are removed."""
    if into != Path("/"):
        return [("systemctl", f"--root={into}", "disable", UNIT)]
    return [("systemctl", "disable", "--now", UNIT)]


def remove(into: Path, paths: list[Path]) -> Iterator[Path]:
    """Remove these files, and tell of each that was there.

    Raises:
        StoreError: one cannot be removed.
    """
    for path in paths:
        if (into / path).exists():
            remove_file(into / path)
            yield path


def settings(into: Path) -> dict[str, str]:
    """What agent.env says.

    Raises:
        StoreError: it cannot be read; SettingError: it is wrong.
    """
    text = _present(into)
    if not text:
        raise StoreError(f"there is no {into / SETTINGS_FILE}; see edge-agent service install --help")
    return environment.read(text)


def program(executable: Path = Path(sys.executable)) -> Path:
    """The edge-agent beside the Python that runs us, which may be a link into somebody's home (pyenv, uv).

    Raises:
        SettingError: there is none, or the service's user could not start it.
    """
    found = executable.with_name("edge-agent")
    if not found.is_file():
        raise SettingError(f"there is no {found}; install Fleetune into this environment, see docs/install")
    for needed in (found, executable.resolve()):
        closed = [folder for folder in needed.parents if not folder.stat().st_mode & 0o001]
        if closed:
            raise SettingError(
                f"{needed}: user fleetune may not enter {closed[-1]}; install into a folder that is open to "
                "all, like /opt/fleetune, with the system's Python"
            )
    return found


def systemd_version() -> int | None:
    """The version of the systemd installed here; None: it does not say."""
    try:
        words = run(("systemctl", "--version")).split()
    except StoreError:
        return None
    return int(words[1]) if len(words) > 1 and words[1].isdecimal() else None


def run(command: Command) -> str:
    """Run a command and return what it printed.

    Raises:
        StoreError: it fails.
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
    """Write a file that is never, not for a moment, readable for more than `mode` says."""
    try:
        make_folder(path.parent, private=False)  # others' files lie there too, e.g. the authority's
        write_atomically(path, content.encode(), mode=mode)
    except StoreError as problem:
        raise StoreError(f"{problem}; sudo may help") from None
