"""Environments of their own for rivals: made once, by pip, kept beside the results."""

import subprocess
import venv
from pathlib import Path

_MADE = "made"


class NotInstalled(Exception):  # noqa: N818 - it reports why there is no such line in the table
    """A rival's packages cannot be installed here."""


def python_in(where: Path, *installs: tuple[str, ...]) -> Path:
    """The Python of the environment in this folder, which is made where there is none yet.

    Args:
        where: the folder.
        installs: what to hand to `pip install`, one call after the other.

    Raises:
        NotInstalled: pip fails; its last line says why.
    """
    python = where / "bin" / "python"
    if not (where / _MADE).exists():
        venv.create(where, clear=True, with_pip=True)
        for packages in installs:
            command = [str(python), "-m", "pip", "install", "--quiet", *packages]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                raise NotInstalled((done.stderr.strip().splitlines() or ["pip says nothing"])[-1])
        (where / _MADE).touch()
    return python
