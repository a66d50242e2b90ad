"""Make stopped runs of every method, with the code of whatever release stands first in PYTHONPATH.

    PYTHONPATH=OLD/src:OLD python tests/data/make_runs.py tests/data/runs-COMMIT.tar.xz

Each is stopped in the middle of a round; beside it stands how that release itself would have gone on.
"""

import shutil
import sqlite3
import sys
import tarfile
import tempfile
from contextlib import closing
from pathlib import Path

import msgspec
from tests.data.make_agent_state import nobodys
from tests.helpers.played_run import SPEC, PlayedRun

from fleetune.protocols.methods import REGISTRY, create

STOPS = {"synchronous": 13, "buffer": 8}  # after so many events a round is open, with one reply in it or more

LARGE = {"pfedla"}  # its networks would be three quarters of the archive


def main(archive: Path) -> None:
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        for mode, stop in STOPS.items():
            for method in sorted(REGISTRY.keys() - LARGE):
                if mode == "synchronous" or create(method, SPEC, {}).semi_asynchronous:
                    make(root / mode / method, method, mode, stop)
        with tarfile.open(archive, "w:xz", preset=9) as tar:
            tar.add(root, ".", filter=nobodys)


def make(folder: Path, method: str, mode: str, stop: int) -> None:
    """`run` and `agents` as they lie on disk when everything stops; `end.json`: as if it went on at once."""
    first = PlayedRun(folder, method, mode)
    assert first.play(end=stop) == stop
    assert first.run.controller.finished is None
    first.close()
    with closing(sqlite3.connect(folder / "run" / "state.sqlite")) as store:
        store.execute("VACUUM")  # else the archive holds what was overwritten
    with tempfile.TemporaryDirectory() as copy:
        shutil.copytree(folder, copy, dirs_exist_ok=True)
        rest = PlayedRun(Path(copy), method, mode)
        rest.play(begin=stop)
        (folder / "end.json").write_bytes(msgspec.json.encode({"begin": stop, **rest.end()}))
        uninterrupted(method, mode, rest)
        rest.close()


def uninterrupted(method: str, mode: str, rest: PlayedRun) -> None:
    """A run that never stopped comes to the same."""
    with tempfile.TemporaryDirectory() as other:
        whole = PlayedRun(Path(other), method, mode)
        whole.play()
        ends = [one.end() | {"sent": None} for one in (whole, rest)]
        assert ends[0] == ends[1], method
        whole.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
