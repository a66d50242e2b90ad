"""Virtual environments for rivals: made once by pip, in the folder of results."""

import subprocess
import venv
from pathlib import Path

_MADE = "made"


class NotInstalled(Exception):  # noqa: N818 - a reason for a missing row, not a failure of ours
    """Pip cannot install a rival's packages here."""


def python_in(where: Path, *installs: tuple[str, ...]) -> Path:
    """Return the Python of the environment in a folder; make the environment if it is missing.

    Args:
        where: the folder.
        installs: arguments of `pip install`, one tuple for each call.

    Raises:
        NotInstalled: pip fails; the message is its last line.
    """
    python = where / "bin" / "python"
    if not (where / _MADE).exists():
        venv.create(where, clear=True, with_pip=True)
        for packages in installs:
            command = [str(python), "-m", "pip", "install", "--quiet", *packages]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                raise NotInstalled((done.stderr.strip().splitlines() or ["pip printed no reason"])[-1])
        (where / _MADE).touch()
    return python
