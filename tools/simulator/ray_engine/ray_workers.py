"""An executor with workers on the nodes of a Ray cluster; same interface as `workers.worker_processes`.

A thread of this process serves each worker. The run's folder on this machine always has every device's latest
files: an answer contains the changed files, and they are written before its future is done. A node also keeps
the files, so they need not be sent again. If a worker or a node dies, another worker repeats its task from
the same files.
"""

import shutil
import threading
import time
from collections.abc import Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from dataclasses import replace as replaced
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

from fleetune.protocols.errors import FleetuneError, StoreError
from fleetune.protocols.one_line import flat
from fleetune.tools.simulator.jobs import ArrivalJob, TrainingJob
from fleetune.tools.simulator.ray_engine import device_copies
from fleetune.tools.simulator.ray_engine.cluster import join
from fleetune.tools.simulator.ray_engine.direct_channel import ChannelError
from fleetune.tools.simulator.ray_engine.node import Node
from fleetune.tools.simulator.ray_engine.node_worker import Answer, NodeWorker
from fleetune.tools.simulator.ray_engine.run_package import RunPackage
from fleetune.tools.simulator.workers.device_files import keep_before

PATIENCE_S = 300.0  # time without any worker; on a busy node importing torch takes minutes
_MOST_DEATHS = 3  # number of workers that may die at one task
_POLL_S, _TO_LEAVE_S = 0.5, 30.0
_spare: list["Node"] = []  # workers that a run of this process left for its next run


def end_spare_workers() -> None:
    """End the workers that this process keeps for its next run, which frees their processors."""
    import ray

    while _spare:
        ray.kill(_spare.pop().actor)


@dataclass(eq=False)
class _Task:
    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    device: str
    closed: int | None
    done: Future[Any]
    deaths: int = 0


@dataclass(eq=False)
class _Schedule:
    """The assignment of tasks to nodes; read and changed under one lock.

    Attributes:
        waiting: tasks without a node, the next one first.
        busy: devices that a node works on.
        holder: the node that has a device's latest files.
        nodes: nodes that can work.
        idle: nodes without a task.
        no_node_since: when the last node was lost, on the monotonic clock.
    """

    waiting: list[_Task] = field(default_factory=list)
    busy: set[str] = field(default_factory=set)
    holder: dict[str, Node] = field(default_factory=dict)
    nodes: set[Node] = field(default_factory=set)
    idle: set[Node] = field(default_factory=set)
    no_node_since: float = field(default_factory=time.monotonic)

    def next_for(self, node: Node) -> _Task | None:
        """Return the next task for a node; None if there is none.

        Devices whose files this node has come first, then devices whose files no idle node has.
        """
        seen, free = set(self.busy), None
        for task in self.waiting:
            holder = self.holder.get(task.device)
            if task.device not in seen:
                if holder is node:
                    return task
                if free is None and holder not in self.idle:
                    free = task
            seen.add(task.device)
        return free

    def remove(self, node: Node) -> None:
        """Remove a node that has ended."""
        if node in self.nodes:
            self.nodes.discard(node)
            self.no_node_since = time.monotonic()
        self.idle.discard(node)
        self.holder = {device: one for device, one in self.holder.items() if one is not node}


class RayWorkers(Executor):
    """Workers on the nodes of a cluster, as many as fit, each with one task at a time.

    On an exception inside the block (Ctrl-C too) it kills the workers. Otherwise it waits for all tasks.

    Args:
        address: address of the cluster's head.
        most: maximum number of workers.
        run: the run whose devices train.
        devices: the folder of devices' states on this machine.
        tell: called with a line about each worker that died, in the thread that submits.
    """

    def __init__(
        self, address: str, most: int, run: RunPackage, devices: Path, tell: Callable[[str], None]
    ) -> None:
        self._ray = join(address)
        self._run = self._ray.put(run)
        self._devices = devices
        self._tell = tell
        self._lines: SimpleQueue[str] = SimpleQueue()
        self._schedule = _Schedule()
        self._broken: BaseException | None = None
        self._closing = self._killed = False
        self._changed = threading.Condition()
        self._finishers = ThreadPoolExecutor(most)
        self._threads = [threading.Thread(target=self._serve, daemon=True) for _ in range(most)]
        for thread in self._threads:
            thread.start()

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Submit a call of a function of `workers.worker`, whose first argument is a job or a device's name.

        The future raises the function's exception, or FleetuneError if the call kills workers or there are
        none.
        """
        assert not kwargs, "functions of `workers.worker` take no keywords"
        self._print_lines()
        job = args[0]
        task = _Task(fn, args, args[0], None, Future())
        if isinstance(job, TrainingJob | ArrivalJob):
            task = _Task(fn, (replaced(job, num_closed=None), *args[1:]), job.name, job.num_closed, Future())
        with self._changed:
            if self._broken is not None:
                task.done.set_exception(self._broken)
                return task.done
            self._schedule.waiting.append(task)
            self._changed.notify_all()
        return task.done

    def kill(self) -> None:
        """End all workers in the middle of their work, and start no more."""
        with self._changed:
            self._killed = True
            self._changed.notify_all()
            nodes = list(self._schedule.nodes)
        for node in nodes:
            self._end(node)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:  # noqa: ARG002 - Executor's
        """Wait for all submitted tasks; after `kill`, wait for nothing."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()
        self._finishers.shutdown()
        for task in self._schedule.waiting:
            task.done.cancel()
        self._print_lines()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is not None:
                self.kill()
            self.shutdown()
        except BaseException:  # Ctrl-C while waiting
            self.kill()
            raise

    def _print_lines(self) -> None:
        with suppress(Empty):
            while True:
                self._tell(self._lines.get_nowait())

    @property
    def _over(self) -> bool:
        return self._killed or self._broken is not None or (self._closing and not self._schedule.waiting)

    def _serve(self) -> None:
        """Run one worker after another, each as long as it lives. Runs in a thread of its own."""
        deaths = 0  # workers in a row that died while starting
        while not self._over:
            node = _spare.pop() if _spare else Node(self._ray, self._actor())
            try:
                if not self._started(node):
                    self._end(node)
                    return
                deaths = 0
                while (task := self._next(node)) is not None:
                    self._run_task(node, task)
            except self._ray.exceptions.RayError as death:
                deaths += node not in self._schedule.nodes
                self._report_death(node, death)
                if deaths >= _MOST_DEATHS and not self._schedule.nodes:
                    why = f"{deaths} workers on the Ray cluster died while starting ({_first_words(death)})"
                    self._break(FleetuneError(why))
            except BaseException as fault:  # noqa: BLE001 - raised by every task
                self._end(node)
                self._break(fault)
            else:
                self._release(node)
                return
            finally:
                if node.channel is not None:
                    node.channel.close()

    def _actor(self) -> Any:
        how = {"num_cpus": 1, "max_restarts": 0, "max_task_retries": 0, "scheduling_strategy": "SPREAD"}
        return self._ray.remote(**how)(NodeWorker).remote()

    def _started(self, node: Node) -> bool:
        """Start the run on a node; True once the node is ready.

        Raises:
            FleetuneError: no node was ready within `PATIENCE_S`.
        """
        node.where, node.channel, node.stale = ("", ""), None, []
        asked = node.actor.begin.remote(self._run)
        while not self._over:
            done, _ = self._ray.wait([asked], timeout=_POLL_S)
            if done:
                answer: Answer = self._ray.get(asked)
                if answer.fault is not None:
                    raise answer.fault
                node.where = self._ray.get(node.actor.where.remote())
                node.connect()
                with self._changed:
                    self._schedule.nodes.add(node)
                return True
            if not self._schedule.nodes and time.monotonic() - self._schedule.no_node_since > PATIENCE_S:
                raise FleetuneError(
                    f"no worker on the Ray cluster was ready within {PATIENCE_S:.0f} s: `ray status` shows"
                    " if it has room; the same command continues the run"
                )
        return False

    def _next(self, node: Node) -> _Task | None:
        """Wait for a node's next task; None if there will be none."""
        with self._changed:
            self._schedule.idle.add(node)
            while (task := self._schedule.next_for(node)) is None and not self._over:
                self._changed.wait()
            self._schedule.idle.discard(node)
            if task is None or self._over:
                return None
            self._schedule.waiting.remove(task)
            self._schedule.busy.add(task.device)
            return task

    def _run_task(self, node: Node, task: _Task) -> None:
        """Run a task on a node. Another thread handles the answer, so that the node can continue."""
        holder = self._schedule.holder.get(task.device)
        try:
            files = None if holder is node else device_copies.all_of(self._devices, task.device)
        except StoreError as problem:
            self._complete(task, None, problem)
            return
        with self._changed:
            stale, node.stale = node.stale, []
        try:
            answer = node.ask(task.function, task.arguments, task.device, files, stale)
        except self._ray.exceptions.RayError as death:
            self._retry(task, death)
            raise
        with self._changed:
            if holder is not None and holder is not node:
                holder.stale.append(task.device)
            self._schedule.holder[task.device] = node
            if answer.fault is not None:
                # the failed function may have left its files half written
                del self._schedule.holder[task.device]
        self._finishers.submit(self._finish, task, answer)

    def _finish(self, task: _Task, answer: Answer) -> None:
        """Write a task's changed files, then complete its future. Runs in another thread."""
        result, fault = answer.result, answer.fault
        try:
            if fault is None:
                if task.closed is not None:
                    keep_before(self._devices, task.device, task.closed)
                device_copies.apply(self._devices, answer.changes)
        except BaseException as problem:  # noqa: BLE001 - raised where it was asked for
            fault = problem
        self._complete(task, result, fault)

    def _complete(self, task: _Task, result: Any, fault: BaseException | None) -> None:
        """Set the result or the exception of a task's future."""
        with self._changed:
            self._schedule.busy.discard(task.device)
            self._changed.notify_all()
        if fault is None:
            task.done.set_result(result)
        else:
            task.done.set_exception(fault)

    def _retry(self, task: _Task, death: BaseException) -> None:
        """Queue a task again, unless several workers died during it."""
        task.deaths += 1
        with self._changed:
            self._schedule.busy.discard(task.device)
            again = task.deaths < _MOST_DEATHS and not self._killed
            if again:
                self._schedule.waiting.insert(0, task)
            self._changed.notify_all()
        if not again:
            why = f"{task.deaths} workers died at {task.device}'s task, perhaps for lack of memory"
            task.done.set_exception(
                FleetuneError(f"{why} ({_first_words(death)}); the same command continues the run")
            )

    def _report_death(self, node: Node, death: BaseException) -> None:
        self._end(node)
        if not self._over:
            where = f" on {node.where[0]}" if node.where[0] else ""
            self._lines.put(f"a worker{where} died ({_first_words(death)}): its task is repeated")

    def _release(self, node: Node) -> None:
        """End the run on a node, and keep the worker for the next run."""
        with self._changed:
            self._schedule.nodes.discard(node)
        if self._killed or self._broken is not None:
            self._end(node)
            return
        try:
            if node.channel is not None:
                node.channel.send(None)
            self._ray.get(node.actor.leave.remote(), timeout=_TO_LEAVE_S)
        except (ChannelError, self._ray.exceptions.RayError):
            self._end(node)
        else:
            _spare.append(node)

    def _end(self, node: Node) -> None:
        with self._changed:
            self._schedule.remove(node)
            self._changed.notify_all()
        with suppress(Exception):  # the worker may have ended already
            self._ray.kill(node.actor)
        if node.channel is not None:
            node.channel.shut_down()
        if node.is_here:  # on other machines the next worker removes the folder
            shutil.rmtree(node.where[1], ignore_errors=True)

    def _break(self, fault: BaseException) -> None:
        """Fail every waiting and every future task with this exception."""
        with self._changed:
            self._broken = self._broken or fault
            tasks, self._schedule.waiting = self._schedule.waiting, []
            self._changed.notify_all()
        for task in tasks:
            task.done.set_exception(self._broken)


def _first_words(problem: BaseException) -> str:
    return flat(str(problem).split(".")[0])[:160]
