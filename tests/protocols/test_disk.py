"""What is written survives a power cut, whenever it comes."""

import os
from contextlib import suppress

import pytest
from tests.helpers.errors import raises
from tests.helpers.power import ForgetfulDisk, PowerCut

from fleetune.coordinator.store.run_store import RunStore
from fleetune.edge_agent.state.agent_store import AgentStore
from fleetune.protocols import disk
from fleetune.protocols.errors import StoreError
from fleetune.protocols.files import append, make_folder, remove, remove_tree, seal, write_atomically
from fleetune.protocols.wire.incoming_parts import PartFile

SEEDS = [None, *range(8)]


def cuts(action, tmp_path, *, before=lambda root: None, seed=None):
    """Every outcome of a power cut before or after any operation of `action`, and of one after it returned:
    (whether it had returned, the folder)."""
    for at in range(200):
        root = tmp_path / f"{seed}-{at}"
        root.mkdir()
        before(root)
        power = ForgetfulDisk(root, seed)
        power.cut_at = at / 2
        returned = False
        with power.in_place(), suppress(PowerCut):
            action(root)
            returned = True
        power.cut()
        yield returned, root
        if returned:
            return
    raise AssertionError("it never returns")


@pytest.mark.parametrize("seed", SEEDS)
def test_a_file_is_the_old_one_or_the_new_one_and_the_new_one_once_it_is_written(tmp_path, seed):
    def write(root):
        write_atomically(root / "file", b"new")

    def old(root):
        (root / "file").write_bytes(b"old")

    seen = set()
    for returned, root in cuts(write, tmp_path, before=old, seed=seed):
        content = (root / "file").read_bytes()
        assert content == b"new" if returned else content in (b"old", b"new")
        seen.add(content)
    assert seen == {b"old", b"new"}


@pytest.mark.parametrize("seed", SEEDS)
def test_folders_that_were_made_on_the_way_stay_too(tmp_path, seed):
    def write(root):
        write_atomically(root / "a" / "b" / "c" / "file", b"new")

    for returned, root in cuts(write, tmp_path, seed=seed):
        path = root / "a" / "b" / "c" / "file"
        assert path.read_bytes() == b"new" if returned else not path.exists() or path.read_bytes() == b"new"


def test_a_folder_that_a_killed_process_made_is_made_to_stay_by_the_next(tmp_path):
    power = ForgetfulDisk(tmp_path)
    with power.in_place():
        power.make_folder(tmp_path / "a")  # and then it was killed
        power.lasting.clear()
        write_atomically(tmp_path / "a" / "file", b"new")
    power.cut()
    assert (tmp_path / "a" / "file").read_bytes() == b"new"


def test_a_part_that_is_sealed_stays_and_one_that_is_not_is_at_most_shorter(tmp_path):
    def receive(root):
        part = PartFile(root / "incoming" / "1.part")
        part.append(b"one")
        part.append(b"two")
        part.seal()

    for seed in SEEDS:
        for returned, root in cuts(receive, tmp_path, seed=seed):
            part = PartFile(root / "incoming" / "1.part")
            assert part.payload() == b"onetwo" if returned else b"onetwo".startswith(part.payload())


def test_what_was_removed_does_not_come_back(tmp_path):
    def leave(root):
        (root / "a" / "b").mkdir(parents=True)
        (root / "a" / "b" / "c").write_bytes(b"1")
        (root / "d").write_bytes(b"2")

    def clear(root):
        remove_tree(root / "a")
        remove(root / "d")

    for returned, root in cuts(clear, tmp_path, before=leave):
        assert not returned or list(root.iterdir()) == []


def test_a_link_is_removed_and_what_it_leads_to_stays(tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "letter").write_bytes(b"dear")
    (tmp_path / "ours").mkdir()
    (tmp_path / "ours" / "link").symlink_to(tmp_path / "mine")
    remove_tree(tmp_path / "ours")
    assert not (tmp_path / "ours").exists()
    assert (tmp_path / "mine" / "letter").read_bytes() == b"dear"


def test_what_an_agent_stores_is_synced_with_the_names_of_its_folders(tmp_path):
    power = ForgetfulDisk(tmp_path)
    store = AgentStore(tmp_path / "state" / "fleet" / "pi")
    with power.in_place():
        store.claim().close()
        store.session("r").write(b"session")
        store.ratio_controller("r").write(b"experience")
        store.keep_task("r", "0" * 32, b"task")
        store.keep_bundle("r", b"bundle")
    power.cut()
    assert store.session("r").read() == b"session"
    assert store.ratio_controller("r").read() == b"experience"
    assert store.task("r", "0" * 32).read() == b"task"
    assert store.bundle("r") == b"bundle"


def test_a_new_runs_folder_stays(tmp_path):
    power = ForgetfulDisk(tmp_path)
    with power.in_place():
        RunStore.open(tmp_path / "runs" / "r" / "state.sqlite").close()
    power.cut()
    assert (tmp_path / "runs" / "r").is_dir()


def test_a_simulation_does_without(tmp_path):
    power = ForgetfulDisk(tmp_path)
    with power.in_place():
        write_atomically(tmp_path / "file", b"new", durable=False)
    power.cut()
    assert not (tmp_path / "file").exists()


def test_a_private_file_is_never_readable_for_others(tmp_path, monkeypatch):
    path, modes = tmp_path / "secret", []
    monkeypatch.setattr(
        os, "fchmod", lambda handle, mode: modes.append((os.fstat(handle).st_mode & 0o777, mode))
    )
    (tmp_path / "secret.new").write_bytes(b"left by a process that was killed")
    write_atomically(path, b"key", mode=0o640)
    assert modes == [(0o640 & ~_umask(), 0o640)]
    assert path.read_bytes() == b"key"


def _umask():
    mask = os.umask(0)
    os.umask(mask)
    return mask


class FullDisk(disk.Disk):
    """Every new byte is one too many."""

    def append(self, path, data, mode=None):
        super().append(path, data[: len(data) // 2])
        raise OSError(28, "No space left on device")

    write = append


def test_a_full_disk_leaves_all_as_it_was_and_says_so_in_one_line(tmp_path, monkeypatch):
    write_atomically(tmp_path / "file", b"old")
    append(tmp_path / "part", b"one", at=0)
    seal(tmp_path / "part")
    monkeypatch.setattr(disk, "DISK", FullDisk())
    for action in (
        lambda: write_atomically(tmp_path / "file", b"new"),
        lambda: append(tmp_path / "part", b"two", at=3),
    ):
        with raises(StoreError, "No space left on device", remedy="space"):
            action()
    assert (tmp_path / "file").read_bytes() == b"old"
    assert (tmp_path / "part").read_bytes() == b"one"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "part"]


def test_a_file_in_the_place_of_a_folder_is_named(tmp_path):
    (tmp_path / "a").write_bytes(b"")
    with pytest.raises(StoreError, match=r"cannot make .*a/b: "):
        make_folder(tmp_path / "a" / "b")
    with pytest.raises(StoreError, match=r"cannot make .*a: File exists"):
        make_folder(tmp_path / "a")
