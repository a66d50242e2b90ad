"""A disk that forgets: it loses what was not synced when the power is cut, and the cut can come anywhere.

It works on real files, so that readers need not know of it, and remembers beside them what the medium
holds: of each file the content that was synced, of each folder the names. Names reach the medium in the
order of their changes, as in a journal; a cut keeps any number of the changes that were not synced, and any
part of a content that was not.
"""

import shutil
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np

from fleetune.protocols import disk


class PowerCut(BaseException):
    """Nothing after this happens any more."""


@dataclass
class _File:
    now: bytes = b""
    synced: bytes = b""


@dataclass
class _Folder:
    now: dict = field(default_factory=dict)
    synced: dict = field(default_factory=dict)
    waiting: list = field(default_factory=list)  # of states of `now` since, oldest first

    def change(self):
        self.waiting.append(dict(self.now))


class ForgetfulDisk(disk.Disk):
    """What lies below `root` when it is made is on the medium.

    Args:
        root: everything below is remembered.
        seed: of what a cut keeps of what was not synced; None: nothing.
        fsync: False: as if nothing were ever synced, so that a test can see that it would notice.
    """

    def __init__(self, root, seed=None):
        super().__init__()
        self.root = root.absolute()
        self._rng = None if seed is None else np.random.default_rng(seed)
        self._tree = self._read(self.root)
        self.count = 0  # of operations so far
        self.cut_at = None  # the power goes before this one; a half: after it was done
        self.dark = False

    @contextmanager
    def in_place(self):
        """All that is written through the seam goes here meanwhile."""
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
        """An operation elsewhere, of which the power may go before or after, too."""
        with self._operation():
            pass

    def cut(self):
        """Lose what the medium does not hold; then the power is back, and no process runs."""
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
