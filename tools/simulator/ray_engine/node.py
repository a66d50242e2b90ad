"""A worker on a node, as seen from the machine that assigns its tasks."""

import socket
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from fleetune.tools.simulator.jobs import TrainingJob
from fleetune.tools.simulator.ray_engine.direct_channel import ChannelError, DirectChannel, connect
from fleetune.tools.simulator.ray_engine.node_worker import Answer

_POLL_S = 0.5
_DEATH_REPORT_S = 10.0  # how long to wait for Ray's report of a worker's death


@dataclass(eq=False)
class Node:
    """A worker on a node of the Ray cluster, as seen from this machine.

    Attributes:
        ray: the module `ray`, which locates the worker and reports its death.
        actor: Ray's handle of the worker.
        where: name of the node, and folder of the run there; "" if not asked yet.
        channel: direct connection to the worker; None if only Ray reaches it, as from outside the cluster.
        stale: devices whose files on the node are out of date.
    """

    ray: Any
    actor: Any
    where: tuple[str, str] = ("", "")
    channel: DirectChannel | None = None
    stale: list[str] = field(default_factory=list)
    _serving: Any = None  # Ray's handle of `NodeWorker.serve`, which ends with the worker

    @property
    def is_here(self) -> bool:
        """True if the worker runs on this machine."""
        return self.where[0] == socket.gethostname()

    def connect(self) -> None:
        """Open a direct connection if possible. Raises Ray's error if the worker died."""
        try:
            self.channel = connect(*self.ray.get(self.actor.listen.remote()))
        except (ChannelError, self.ray.exceptions.RayTaskError):
            self.channel = None
        else:
            self._serving = self.actor.serve.remote()

    def ask(self, function: Callable[..., Any], arguments: tuple[Any, ...], *of: Any) -> Answer:
        """Call `NodeWorker.work`, and return its answer. Raises Ray's error if the worker died."""
        if self.channel is None or not self.is_here:
            arguments = tuple(one.for_elsewhere if isinstance(one, TrainingJob) else one for one in arguments)
        piece = (function, arguments, *of)
        if self.channel is None:
            return self.ray.get(self.actor.work.remote(*piece))  # type: ignore[no-any-return]
        try:
            self.channel.send(piece)
            while not self.channel.poll(_POLL_S):
                if self.ray.wait([self._serving], timeout=0)[0]:
                    raise self._death()
            return self.channel.receive()  # type: ignore[no-any-return]
        except ChannelError:
            raise self._death() from None

    def _death(self) -> BaseException:
        """Return Ray's report of why the worker died."""
        errors = self.ray.exceptions
        death: BaseException = errors.RayError("its connection broke")
        try:
            self.ray.get(self._serving, timeout=_DEATH_REPORT_S)
        except errors.RayError as problem:
            if not isinstance(problem, errors.GetTimeoutError):  # Ray has no report yet
                death = problem
        return death
