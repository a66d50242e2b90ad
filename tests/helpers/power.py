"""A disk that loses unsynced data at a simulated power cut, before or after any operation.

It works on real files, so readers need no change. It also remembers the state of the medium: the synced
content of each file, and the names in each folder. Names reach the medium in the order of their changes, as
in a journal. A cut keeps any number of the unsynced changes, and any part of an unsynced content.
"""

import shutil
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np

from fleetune.protocols import disk


class PowerCut(BaseException):
    """The simulated power is cut: no operation follows."""


@dataclass
class _File:
    now: bytes = b""
    synced: bytes = b""


@dataclass
class _Folder:
    now: dict = field(default_factory=dict)
    synced: dict = field(default_factory=dict)
    waiting: list = field(default_factory=list)  # states of `now` since the last sync, oldest first

    def change(self):
        self.waiting.append(dict(self.now))


class ForgetfulDisk(disk.Disk):
    """A forgetful disk. Everything below `root` at its creation is on the medium.

    Args:
        root: folder that is tracked.
        seed: chooses which unsynced data a cut keeps; None: a cut keeps nothing.
        fsync: False ignores every sync, so that a test can check that it detects missing syncs.
    """

    def __init__(self, root, seed=None):
        super().__init__()
        self.root = root.absolute()
        self._rng = None if seed is None else np.random.default_rng(seed)
        self._tree = self._read(self.root)
        self.count = 0  # number of operations so far
        self.cut_at = None  # the power is cut before this operation; with .5 after it
        self.dark = False

    @contextmanager
    def in_place(self):
        """Redirect all writes of the product to this disk inside the block."""
        before, disk.DISK = disk.DISK, self
        try:
            yield self
        finally:
            disk.DISK = before

    def make_folder(self, path, mode=disk.PRIVATE_FOLDER):
        with self._operation():
            super().make_folder(path, mode)
            self._enter(path, _Folder())

    def write(self, path, data, mode=disk.PRIVATE):
        with self._operation():
            super().write(path, data, mode)
            self._open(path).now = bytes(data)

    def append(self, path, data):
        with self._operation():
            super().append(path, data)
            self._open(path).now += bytes(data)

    def truncate(self, path, num_bytes):
        with self._operation():
            super().truncate(path, num_bytes)
            file = self._open(path)
            file.now = file.now[:num_bytes]

    def rename(self, path, new):
        with self._operation():
            super().rename(path, new)
            node = self._folder(path).now[path.name]
            self._leave(path)
            self._enter(new, node)

    def remove(self, path):
        with self._operation():
            super().remove(path)
            self._leave(path)

    def remove_folder(self, path):
        with self._operation():
            super().remove_folder(path)
            self._leave(path)

    def sync(self, path):
        with self._operation():
            file = self._open(path)
            file.synced = file.now

    def sync_folder(self, path):
        with self._operation():
            if path.absolute().is_relative_to(self.root):
                folder = self._node(path)
                folder.synced, folder.waiting = dict(folder.now), []

    def pass_by(self):
        """Count an operation outside this disk; the power may be cut before or after it."""
        with self._operation():
            pass

    def cut(self):
        """Discard data that the medium does not hold; the power is then back, and no process runs."""
        shutil.rmtree(self.root)
        self._tree = self._survivor(self._tree)
        self._restore(self.root, self._tree)
        self.lasting.clear()
        self.dark, self.cut_at = False, None

    @contextmanager
    def _operation(self):
        if self.dark or self.cut_at == self.count:
            self.dark = True
            raise PowerCut
        yield
        self.count += 1
        if self.cut_at == self.count - 0.5:
            self.dark = True
            raise PowerCut

    def _survivor(self, node):
        if isinstance(node, _File):
            content = self._some_content(node)
            return _File(content, content)
        states = [node.synced, *node.waiting]
        names = states[0 if self._rng is None else self._rng.integers(len(states))]
        kept = {name: self._survivor(child) for name, child in names.items()}
        return _Folder(dict(kept), dict(kept))

    def _some_content(self, file):
        if self._rng is None or file.now == file.synced or self._rng.random() < 0.5:
            return file.synced
        return file.now[: self._rng.integers(len(file.now) + 1)]

    def _restore(self, path, node):
        if isinstance(node, _File):
            path.write_bytes(node.now)
            return
        path.mkdir()
        for name, child in node.now.items():
            self._restore(path / name, child)

    def _read(self, path):
        if not path.is_dir():
            content = path.read_bytes()
            return _File(content, content)
        names = {one.name: self._read(one) for one in path.iterdir()}
        return _Folder(dict(names), dict(names))

    def _node(self, path):
        node = self._tree
        for name in path.absolute().relative_to(self.root).parts:
            node = node.now.setdefault(name, _Folder())
        return node

    def _folder(self, path):
        return self._node(path.parent)

    def _open(self, path):
        folder = self._folder(path)
        if path.name not in folder.now:
            self._enter(path, _File())
        return folder.now[path.name]

    def _enter(self, path, node):
        folder = self._folder(path)
        folder.now[path.name] = node
        folder.change()

    def _leave(self, path):
        folder = self._folder(path)
        folder.now.pop(path.name, None)
        folder.change()
