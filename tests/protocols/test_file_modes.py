"""Who may read what is written: state, models and runs are their owner's alone, outputs as the umask says."""

import os
import stat
import sys

import pytest

from fleetune.protocols.files import append, keep_private, make_folder, make_private_file, write_atomically

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="permissions of POSIX")


@pytest.fixture(params=[0o022, 0o000, 0o077])
def umask(request):
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


def mode(path):
    return stat.S_IMODE(path.stat().st_mode)


def test_what_is_kept_is_private_whatever_the_umask(tmp_path, umask):
    write_atomically(tmp_path / "a" / "b" / "file", b"x")
    append(tmp_path / "c" / "part", b"x", at=0)
    make_folder(tmp_path / "d" / "e")
    make_private_file(tmp_path / "d" / "store")
    found = {str(one.relative_to(tmp_path)): mode(one) for one in sorted(tmp_path.rglob("*"))}
    folders = dict.fromkeys(("a", "a/b", "c", "d", "d/e"), 0o700)
    assert found == folders | dict.fromkeys(("a/b/file", "c/part", "d/store"), 0o600)


def test_what_a_user_names_is_as_the_umask_or_the_user_says(tmp_path, umask):
    write_atomically(tmp_path / "out" / "file", b"x", mode=None)
    assert mode(tmp_path / "out") == 0o777 & ~umask
    assert mode(tmp_path / "out" / "file") == 0o666 & ~umask
    write_atomically(tmp_path / "out" / "file", b"y", mode=0o640)
    assert mode(tmp_path / "out" / "file") == 0o640


def test_a_folder_of_an_older_release_is_closed_to_others(tmp_path, caplog):
    folder = tmp_path / "old"
    folder.mkdir()
    folder.chmod(0o755)
    with caplog.at_level("INFO"):
        keep_private(folder)
        keep_private(folder)
    assert mode(folder) == 0o700
    assert [one.getMessage() for one in caplog.records] == [
        f"{folder} was open to other users; only its owner can access it now"
    ]
    keep_private(tmp_path / "none")


@pytest.mark.skipif(sys.platform == "win32" or os.geteuid() != 0, reason="only root gives files to others")
def test_what_root_writes_for_a_service_belongs_to_the_services_user(tmp_path):
    state = tmp_path / "state"
    state.mkdir(mode=0o700)
    os.chown(state, 4321, 4322)
    write_atomically(state / "versions" / "pin", b"x")
    make_private_file(state / "samples.sqlite")
    append(state / "incoming" / "part", b"x", at=0)
    found = list(state.rglob("*"))
    assert len(found) == 5
    assert {(one.stat().st_uid, one.stat().st_gid) for one in found} == {(4321, 4322)}
    keep_private(state)
    write_atomically(state / "out", b"x", mode=None)
    assert (state / "out").stat().st_uid == 0
