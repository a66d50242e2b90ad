"""`Agent`: an agent within your own program. It takes samples and predicts with the device's own model.

    from fleetune import Agent

    with Agent(store="/var/lib/fleetune") as agent:  # after edge-agent join LINE --state /var/lib/fleetune
        for window in sensor:
            agent.add(window) prediction = agent.predict(window)

See docs/library.md.
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
from typing import Any, Self, Unpack

import numpy as np

from fleetune.edge_agent.library.agent_process import AgentProcess
from fleetune.edge_agent.library.messages import ActivityReport, ChildMessage, Ended, LogLine
from fleetune.edge_agent.library.options import AgentOptions, check_options, claim
from fleetune.edge_agent.library.prediction import Prediction
from fleetune.edge_agent.library.state import AgentState, DeployedModelReader, SampleCountsReader
from fleetune.edge_agent.personal.deployed_predictor import Follower
from fleetune.edge_agent.personal.predictions import predictions_of
from fleetune.edge_agent.run.activity import Activity
from fleetune.edge_agent.run.growing_data import sample_requirements
from fleetune.edge_agent.state.agent_store import AgentStore
from fleetune.edge_agent.state.defaults import STATE, TEST_FRACTION
from fleetune.edge_agent.stream.intakes.write_queue import NamedLabel, SampleQueue
from fleetune.edge_agent.stream.sample import BadSample, Sample, make_label, make_name, make_sample
from fleetune.edge_agent.stream.sample_requirements import SampleRequirements
from fleetune.edge_agent.stream.sample_store import SampleStore
from fleetune.edge_agent.stream.sample_stream import INTAKE
from fleetune.protocols.errors import AgentClosed, DataError, FleetuneError
from fleetune.protocols.one_line import unexpected
from fleetune.protocols.wire.payloads import read_enrolment

CLOSE_S = 30.0
LEFTOVER_S = 3.0  # the child of a killed program ends within this time
_POLL_S = 0.5

log = logging.getLogger(__name__)


class Agent:
    """A device of a fleet within this program. Any thread may call any method.

    A child process connects and trains, as `edge-agent run` does. It is restarted if it dies, and it ends
    when this program ends or is killed. The device's state is the same as with `edge-agent run`. So
    `edge-agent models`, `samples`, `explain`, `rollback` and `pin` work on it at the same time.

    Args:
        broker: a broker of your own, as `edge-agent run --broker`; None: that of FLEETUNE_BROKER, or else the
            broker of the fleet that this device has joined (`edge-agent join`).
        fleet: name of the fleet; None: the one that this device has joined.
        device: id of this device, as `edge-agent run --device`.
        store: folder of agents' state, as `edge-agent run --state`.
        data: a stream that also brings samples, as `edge-agent run --data`.
        bundle: the run's bundle, which `edge-coordinator export` writes. `predict` needs it if torch trains.
        options: other options of `edge-agent run`, by name.

    Raises:
        SettingError, DataError, ModelError: an option, the data or the model is wrong, as for `edge-agent
            run`.
        StoreError: another agent uses this device's state, or it cannot be read or written.
    """

    def __init__(
        self,
        broker: str | None = None,
        *,
        fleet: str | None = None,
        device: str | None = None,
        store: Path | str = STATE,
        data: str = INTAKE,
        bundle: Path | str | None = None,
        **options: Unpack[AgentOptions],
    ) -> None:
        state = Path(store).expanduser().absolute()
        self._store = AgentStore.of(state, fleet, device, options.get("name"))
        given = check_options(broker, fleet, self._store.device, state, data, options)
        self._fleet, self._device, self._pid = given["fleet"], self._store.device, os.getpid()
        any_sample = SampleRequirements(
            lambda *_: True, test_fraction=options.get("test_fraction", TEST_FRACTION)
        )
        latest = self._store.runs()[:1]
        # for counting samples until a run is joined
        self._requirements = self._requirements_of(latest[0], any_sample) if latest else any_sample
        self._activity = Activity()
        self._last_error: tuple[str, datetime] | None = None
        self._changed = threading.Condition()
        self._closing, self._stopped, self._is_closed = threading.Lock(), threading.Event(), False
        self._deployed = DeployedModelReader(self._store)
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
        self._process = AgentProcess(given, self._lock, self._on_message)
        self._writer.start()
        try:
            self._process.start()
        except BaseException:
            self.close()
            raise
        atexit.register(self.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def add(self, x: Any, y: Any = None, id: str | int | None = None) -> str | None:  # noqa: A002 - as users say
        """Queue a sample for storage and return at once; the sample is written in the background (see
        `flush`).

        Args:
            x: the input: numbers, any shape but (). uint8 stays (the model sees 0..1), others become float32.
                It is copied, so the array may be used again.
            y: the label: a class from 0, or numbers; None if it may be added later.
            id: your name for the sample, by which `label` finds it later; None if it gets a name from its
                content.

        Returns:
            The sample's id; None if it was refused (NaN, no numbers, a label that the model does not have, or
            the disk has been full for long). Refused samples are counted in `state.samples.refused` and
            logged once an hour. A failing sensor stops no loop.

        Raises:
            AgentClosed: the agent is closed.
        """
        self._check_open()
        sample = self._make_sample(x, y, id)
        if sample is None:
            return None
        name = sample.name or sample.digest.hex()
        held = sample.x.copy() if isinstance(x, np.ndarray) and np.may_share_memory(x, sample.x) else sample.x
        return name if self._put(replace(sample, name=name, x=held)) else None

    def label(self, id: str | int, y: Any) -> bool:  # noqa: A002
        """Set or change the label of a sample. It returns at once.

        Args:
            id: the sample's id, which `add` returned.
            y: the label, as in `add`.

        Returns:
            True if the label will be written. If no such sample is stored, the label is refused and counted
            then.

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
        """Wait until all samples and labels so far are on disk, where they survive a power cut.

        Returns:
            True if they are; False if they were not within `timeout_s`, for example because the disk is full.

        Raises:
            AgentClosed: the agent is closed.
        """
        self._check_open()
        return self._queue.wait_until_written(timeout_s)

    def predict(self, x: Any) -> Prediction | None:
        """Return the deployed model's prediction for one sample, without waiting for training.

        When another model is deployed, also by `edge-agent rollback` or `pin`, the next call uses that model.

        Args:
            x: the input, as in `add`.

        Returns:
            The prediction, with the content of `edge-agent predict`; None if there is no model yet, or the
            input is not valid (NaN, or another shape than the model's). An invalid input is counted and
            logged as in `add`.

        Raises:
            AgentClosed: the agent is closed.
            ModelError: ONNX Runtime is not installed.
        """
        found = self.predict_many([x])
        return found[0] if found else None

    def predict_many(self, samples: Sequence[Any]) -> list[Prediction | None] | None:
        """Return predictions for several samples, in their order; None if there is no model yet.

        Raises the errors of `predict`.
        """
        self._check_open()
        deployed_model = self._follower.deployed()
        if deployed_model is None:
            return None
        made = [self._make_sample(x) for x in samples]
        shapes = [None if one is None else one.x.shape for one in made]
        answers: list[Prediction | None] = [None] * len(made)
        for shape in dict.fromkeys(one for one in shapes if one is not None):
            places = [place for place, one in enumerate(shapes) if one == shape]
            arrays = [one.x for one in made if one is not None and one.x.shape == shape]
            try:
                answer = predictions_of(deployed_model.predictor, np.stack(arrays), None, "predict")
            except DataError as problem:
                self._refuse(BadSample("shape", str(problem)), len(places))
                continue
            for index, place in enumerate(places):
                answers[place] = Prediction(answer, deployed_model.record, index)
        return answers

    @property
    def state(self) -> AgentState:
        """The agent's current state, also after it was closed. Raises StoreError: it cannot be read."""
        with self._changed:
            activity, error = self._activity, self._last_error
        fields = asdict(activity)
        return AgentState(
            self._fleet,
            self._device,
            **fields,
            samples=self._counts.read(self._requirements, len(self._queue)),
            deployed=self._deployed.read(),
            last_error=None if error is None else error[0],
            last_error_at=None if error is None else error[1],
        )

    def wait_for(
        self, condition: Callable[[AgentState], bool], timeout_s: float | None = None
    ) -> AgentState | None:
        """Wait until a condition on the state holds, and return the state.

        In asyncio, use `await asyncio.to_thread(agent.wait_for, ...)`.

        Args:
            condition: called with the state at each change, and twice a second.
            timeout_s: longest time to wait, in seconds; None for no limit.

        Returns:
            The state for which the condition holds; None if it did not hold in time.

        Raises:
            AgentClosed: the agent is closed, or was closed meanwhile.
        """
        give_up_at = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            self._check_open()
            seen, found = self._activity, self.state
            if condition(found):
                return found
            left = _POLL_S if give_up_at is None else min(_POLL_S, give_up_at - time.monotonic())
            if left <= 0:
                return None
            with self._changed:
                if self._activity is seen:
                    self._changed.wait(left)

    def close(self, timeout_s: float = CLOSE_S) -> None:
        """Leave the fleet. Waiting samples are written, and training stops at a safe point.

        Training continues from there when an agent starts on this store again. Closing twice is allowed.

        Args:
            timeout_s: time in seconds after which the child process is killed. Killing it loses nothing.
        """
        with self._closing:
            if self._is_closed or self._pid != os.getpid():
                return
            self._is_closed = True
            try:
                self._process.close(timeout_s)
            finally:
                self._set_activity(replace(self._activity, connection="closed", training=False))
                self._stopped.set()
                self._queue.end()
                self._writer.join(timeout_s)
                if len(self._queue):
                    self._warn(f"{len(self._queue)} samples and labels could not be written and are lost")
                self._samples.close()
                self._lock.close()
                atexit.unregister(self.close)

    def _check_open(self) -> None:
        if self._is_closed:
            raise AgentClosed(f"the agent of {self._fleet}/{self._device} is closed; create another one")
        if self._pid != os.getpid():
            raise AgentClosed(
                "this process was forked from the agent's process; create an agent after the fork"
            )

    def _make_sample(self, x: Any, y: Any = None, name: object = None) -> Sample | None:
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
        self._refuse(BadSample("disk", "the disk has been full or busy for long; a sample or label is lost"))
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

    def _on_message(self, message: ChildMessage) -> None:
        match message:
            case ActivityReport(activity):
                self._set_activity(activity)
            case LogLine(level, name, line):
                logging.getLogger(name).log(level, "%s", line)
                if level >= logging.WARNING:
                    self._note_error(line)
            case Ended(why):
                self._warn(why)
                self._set_activity(
                    replace(self._activity, connection=f"not connected: {why}", training=False)
                )

    def _set_activity(self, activity: Activity) -> None:
        if activity.run is not None and activity.run != self._activity.run:
            self._requirements = self._requirements_of(activity.run, self._requirements)
            # from now on `add` refuses samples that the run's model cannot use
            self._samples.require(self._requirements)
        with self._changed:
            self._activity = activity
            self._changed.notify_all()

    def _requirements_of(self, run: str, before: SampleRequirements) -> SampleRequirements:
        """Requirements of a run's model; `before` if the run's enrolment cannot be read."""
        try:
            data = self._store.enrolment(run).read()
            return before if data is None else sample_requirements(read_enrolment(data), before.test_fraction)
        except FleetuneError as problem:
            log.debug("%s", problem)
            return before
