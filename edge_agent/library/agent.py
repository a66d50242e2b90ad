"""An agent in a program of one's own: samples in, predictions of the device's own model out.

    from fleetune import Agent

    with Agent("mqtt://join:PASSWORD@edge:1883", fleet="motors", store="/var/lib/fleetune") as agent:
        for window in sensor:
            agent.add(window)
            prediction = agent.predict(window)

docs/library.md tells more.
"""

import atexit
import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from datetime import datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Self, Unpack

import numpy as np

from fleetune.edge_agent.library.agent_process import AgentProcess
from fleetune.edge_agent.library.messages import ActivityReport, ChildMessage, Ended, LogLine
from fleetune.edge_agent.library.options import AgentOptions, checked, claim
from fleetune.edge_agent.library.prediction import Prediction
from fleetune.edge_agent.library.state import AgentState, DeployedModelReader, SampleCountsReader
from fleetune.edge_agent.personal.deployed_predictor import Follower
from fleetune.edge_agent.personal.predictions import told_of
from fleetune.edge_agent.run.activity import Activity
from fleetune.edge_agent.run.growing_data import wanted
from fleetune.edge_agent.state.agent_store import AgentStore
from fleetune.edge_agent.state.defaults import HOST, STATE, TEST_FRACTION
from fleetune.edge_agent.stream.intakes.library_call import NamedLabel, SampleQueue
from fleetune.edge_agent.stream.sample import BadSample, Sample, make_label, make_name, make_sample
from fleetune.edge_agent.stream.sample_requirements import SampleRequirements
from fleetune.edge_agent.stream.sample_store import SampleStore
from fleetune.edge_agent.stream.sample_stream import INTAKE
from fleetune.protocols.errors import AgentClosed, DataError, FleetuneError
from fleetune.protocols.one_line import unexpected
from fleetune.protocols.wire.payloads import read_enrolment

CLOSE_S = 30.0
LEFTOVER_S = 3.0  # the child of a program that was killed ends within this
_LOOK_S = 0.5

log = logging.getLogger(__name__)


class Agent:
    """A device of a fleet, in this program. Any thread may call anything.

    Connecting and training go on in a child process, which is `edge-agent run` and is begun again if it dies.
    When this program ends, however it does, so does the child. The device's state is that of `edge-agent
    run`: `edge-agent models`, `samples`, `explain`, `rollback` and `pin` work on it meanwhile.

    Args:
        broker: as `edge-agent run --broker`; None: what FLEETUNE_BROKER says.
        fleet: its name.
        device: this device's name.
        store: folder of agents' state, as `edge-agent run --state`.
        data: what else brings samples, as `edge-agent run --data`: data that grow.
        bundle: file of the run's bundle, by `edge-coordinator export`; `predict` needs it where torch trains.
        options: others of `edge-agent run`, by name.

    Raises:
        SettingError, DataError, ModelError: as `edge-agent run` says them.
        StoreError: another agent uses this device's state, or it cannot be used.
    """

    def __init__(
        self,
        broker: str | None = None,
        *,
        fleet: str,
        device: str = HOST,
        store: Path | str = STATE,
        data: str = INTAKE,
        bundle: Path | str | None = None,
        **options: Unpack[AgentOptions],
    ) -> None:
        given = checked(broker, fleet, device, Path(store), data, options)
        self._fleet, self._device, self._pid = fleet, device, os.getpid()
        self._store = AgentStore(Path(given["state"]) / fleet / device)
        any_form = SampleRequirements(
            lambda *_: True, test_fraction=options.get("test_fraction", TEST_FRACTION)
        )
        latest = self._store.runs()[:1]
        self._wanted = self._wanted_by(latest[0], any_form) if latest else any_form  # by which it is counted
        self._activity = Activity()
        self._last_error: tuple[str, datetime] | None = None
        self._changed = threading.Condition()
        self._closing, self._stopped, self._is_closed = threading.Lock(), threading.Event(), False
        self._served = DeployedModelReader(self._store)
        file = None if bundle is None else Path(bundle).absolute()
        self._follower = Follower(self._store, tuple(options.get("trust", ())), self._warn, bundle=file)
        self._lock = claim(self._store, LEFTOVER_S)
        try:
            self._samples = SampleStore.open(self._store.samples)
        except BaseException:
            self._lock.close()
            raise
        self._queue, self._counts = SampleQueue(self._samples), SampleCountsReader(self._samples)
        self._writer = threading.Thread(
            target=self._queue.run, args=(self._stopped,), name="samples", daemon=True
        )
        self._process = AgentProcess(given, self._lock, self._hear)
        self._writer.start()
        try:
            self._process.start()
        except BaseException:
            self.close()
            raise
        atexit.register(self.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, problem: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def add(self, x: Any, y: Any = None, id: str | int | None = None) -> str | None:  # noqa: A002 - as users say
        """Keep a sample. It returns at once: the sample is on its way to the disk, see `flush`.

        Args:
            x: its input: numbers, any shape but (). uint8 stays (the model sees 0..1), others become float32.
                It is copied: the array may be used again.
            y: its label: a class, from 0, or numbers; None: it may still come.
            id: a name of yours, by which `label` finds it later; None: it is given one by its content.

        Returns:
            Its id; None: it cannot be kept (NaN, no numbers, a label that no model has, or the disk has been
            full for long). That is counted, in `state.samples.refused`, and told once an hour in the log: a
            sensor that fails stops no loop.

        Raises:
            AgentClosed: the agent is closed.
        """
        self._check_open()
        sample = self._made(x, y, id)
        if sample is None:
            return None
        name = sample.name or sample.digest.hex()
        held = sample.x.copy() if isinstance(x, np.ndarray) and np.may_share_memory(x, sample.x) else sample.x
        return name if self._put(replace(sample, name=name, x=held)) else None

    def label(self, id: str | int, y: Any) -> bool:  # noqa: A002
        """Give a sample its label, or another one; it returns at once.

        Args:
            id: what `add` returned.
            y: as in `add`.

        Returns:
            Whether it is on its way. A sample that is not kept (any more) is found then: it is counted.

        Raises:
            AgentClosed: the agent is closed.
        """
        self._check_open()
        try:
            item = NamedLabel(make_name(id), make_label(y))
        except BadSample as problem:
            self._refuse(problem)
            return False
        return self._put(item)

    def flush(self, timeout_s: float | None = None) -> bool:
        """Wait until all samples and labels so far are on disk, where a power cut does not harm them.

        Returns:
            Whether they are; a full disk keeps them waiting.

        Raises:
            AgentClosed: the agent is closed.
        """
        self._check_open()
        return self._queue.wait_until_kept(timeout_s)

    def predict(self, x: Any) -> Prediction | None:
        """What the model that the device serves just now makes of one sample; it waits for no training.

        When another model is served, also by `edge-agent rollback` or `pin`, the next call asks that one.

        Args:
            x: its input, as in `add`.

        Returns:
            What `edge-agent predict` says of it; None: there is no model yet, or the sample is none (NaN,
            another shape than the model's), which is counted and told as in `add`.

        Raises:
            AgentClosed: the agent is closed.
            ModelError: ONNX Runtime is not installed here.
        """
        found = self.predict_many([x])
        return found[0] if found else None

    def predict_many(self, samples: Sequence[Any]) -> list[Prediction | None] | None:
        """Likewise of several at once, in their order; None: there is no model yet. Raises as `predict`."""
        self._check_open()
        served = self._follower.served()
        if served is None:
            return None
        made = [self._made(x) for x in samples]
        shapes = [None if one is None else one.x.shape for one in made]
        answers: list[Prediction | None] = [None] * len(made)
        for shape in dict.fromkeys(one for one in shapes if one is not None):
            places = [place for place, one in enumerate(shapes) if one == shape]
            arrays = [one.x for one in made if one is not None and one.x.shape == shape]
            try:
                told = told_of(served.predictor, np.stack(arrays), None, "predict")
            except DataError as problem:
                self._refuse(BadSample("shape", str(problem)), len(places))
                continue
            for index, place in enumerate(places):
                answers[place] = Prediction(told, served.record, index)
        return answers

    @property
    def state(self) -> AgentState:
        """What stands just now, also of an agent that is closed. Raises StoreError: it cannot be read."""
        with self._changed:
            activity, error = self._activity, self._last_error
        told = asdict(activity)
        return AgentState(
            self._fleet,
            self._device,
            **told,
            samples=self._counts.read(self._wanted, len(self._queue)),
            served=self._served.read(),
            last_error=None if error is None else error[0],
            last_error_at=None if error is None else error[1],
        )

    def wait_for(
        self, condition: Callable[[AgentState], bool], timeout_s: float | None = None
    ) -> AgentState | None:
        """Wait until the state is such; in asyncio: `await asyncio.to_thread(agent.wait_for, ...)`.

        Args:
            condition: asked whenever something has changed, and twice a second.
            timeout_s: how long; None: for ever.

        Returns:
            The state that is such; None: none was by then.

        Raises:
            AgentClosed: the agent is closed, also meanwhile.
        """
        give_up_at = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            self._check_open()
            seen, found = self._activity, self.state
            if condition(found):
                return found
            left = _LOOK_S if give_up_at is None else min(_LOOK_S, give_up_at - time.monotonic())
            if left <= 0:
                return None
            with self._changed:
                if self._activity is seen:
                    self._changed.wait(left)

    def close(self, timeout_s: float = CLOSE_S) -> None:
        """Leave the fleet: what waits is written, training stops at a safe point and goes on from there when
        an agent is next started on this store. Closing again does nothing.

        Args:
            timeout_s: after which the child process is killed, which loses nothing either.
        """
        with self._closing:
            if self._is_closed or self._pid != os.getpid():
                return
            self._is_closed = True
            try:
                self._process.close(timeout_s)
            finally:
                self._note(replace(self._activity, connection="closed", training=False))
                self._stopped.set()
                self._queue.end()
                self._writer.join(timeout_s)
                if len(self._queue):
                    self._warn(f"{len(self._queue)} samples and labels could not be written, and are lost")
                self._samples.close()
                self._lock.close()
                atexit.unregister(self.close)

    def _check_open(self) -> None:
        if self._is_closed:
            raise AgentClosed(f"the agent of {self._fleet}/{self._device} is closed; make another one")
        if self._pid != os.getpid():
            raise AgentClosed("this agent is another process's, which has forked; make one after the fork")

    def _made(self, x: Any, y: Any = None, name: object = None) -> Sample | None:
        try:
            return make_sample(x, y, name)
        except BadSample as problem:
            self._refuse(problem)
        except Exception as fault:  # noqa: BLE001 - an array of another library may raise anything when it is read
            self._refuse(BadSample("not-numbers", f"a sample cannot be read: {unexpected(fault)}"))
        return None

    def _put(self, item: Sample | NamedLabel) -> bool:
        if self._queue.put(item):
            return True
        self._refuse(BadSample("disk", "the disk has been busy or full for long: a sample or label is lost"))
        return False

    def _refuse(self, problem: BadSample, count: int = 1) -> None:
        self._samples.refuse(problem, count)
        self._note_error(str(problem))

    def _warn(self, words: str) -> None:
        log.warning("%s", words)
        self._note_error(words)

    def _note_error(self, words: str) -> None:
        with self._changed:
            self._last_error = words, datetime.now().astimezone()

    def _hear(self, word: ChildMessage) -> None:
        match word:
            case ActivityReport(activity):
                self._note(activity)
            case LogLine(level, name, line):
                logging.getLogger(name).log(level, "%s", line)
                if level >= logging.WARNING:
                    self._note_error(line)
            case Ended(why):
                self._warn(why)
                self._note(replace(self._activity, connection=f"not connected: {why}", training=False))

    def _note(self, activity: Activity) -> None:
        if activity.run is not None and activity.run != self._activity.run:
            self._wanted = self._wanted_by(activity.run, self._wanted)
            self._samples.require(self._wanted)  # what its model can do nothing with is refused here too
        with self._changed:
            self._activity = activity
            self._changed.notify_all()

    def _wanted_by(self, run: str, before: SampleRequirements) -> SampleRequirements:
        """What a run's model takes; what was wanted `before` where that cannot be read."""
        try:
            data = self._store.enrolment(run).read()
            return before if data is None else wanted(read_enrolment(data), before.test_fraction)
        except FleetuneError as problem:
            log.debug("%s", problem)
            return before
