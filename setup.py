"""Sets the version of a build: 0.2.0.devN, where N is the number of commits.

N rises with each commit, so `pip install -U` replaces an older build. A source distribution keeps the version
that it was made with. A tree without git, or with a part of its history, builds as 0.2.0.dev0.
"""

import subprocess
import sys
from email.parser import HeaderParser
from pathlib import Path

from setuptools import setup

NEXT = "0.2.0"
HERE = Path(__file__).resolve().parent


def built_version() -> str:
    """PEP 440 version of this source tree."""
    made = HERE / "PKG-INFO"  # in a source distribution
    if made.exists():
        return str(HeaderParser().parsestr(made.read_text(encoding="utf-8"))["Version"])
    found = "it has no git history" if not (HERE / ".git").exists() else _history_problem()
    if found is None:
        return f"{NEXT}.dev{_git('rev-list', '--count', 'HEAD')}"
    print(f"fleetune: version {NEXT}.dev0, because {found}; pip will not see it as newer", file=sys.stderr)
    return f"{NEXT}.dev0"


def _history_problem() -> str | None:
    try:
        shallow = _git("rev-parse", "--is-shallow-repository") == "true"
    except (OSError, subprocess.CalledProcessError) as problem:
        return f"git does not read its history ({problem})"
    return "its clone is shallow: run `git fetch --unshallow`" if shallow else None


def _git(*words: str) -> str:
    done = subprocess.run(["git", *words], cwd=HERE, check=True, capture_output=True, text=True)
    return done.stdout.strip()


setup(version=built_version())
