"""The parts of a run, and the function that builds and connects them."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from fleetune.coordinator.combine.round_combine import RoundCombine
from fleetune.coordinator.extensions.extension import Extensions, RunContext
from fleetune.coordinator.extensions.order import extensions_of
from fleetune.coordinator.extensions.privacy.noisy_mean import noisy_mean
from fleetune.coordinator.extensions.update_norms import UpdateNorms
from fleetune.coordinator.rounds.engine_state import EngineState, RoundAttempt
from fleetune.coordinator.run.aggregation import Aggregation, MethodRun
from fleetune.coordinator.run.open_round import OpenRound
from fleetune.coordinator.run.traffic_accounts import Accounts
from fleetune.coordinator.store.device_rows import DeviceRows, read_ledger
from fleetune.coordinator.store.open_replies import OpenReplies
from fleetune.coordinator.store.run_store import RunStore
from fleetune.coordinator.tasks.assignment import Tasks
from fleetune.coordinator.tasks.device_models import DeviceModels
from fleetune.coordinator.tasks.downlink import Downlink
from fleetune.protocols.method.method import DeviceId, Method
from fleetune.protocols.private_noise import secret_normal
from fleetune.protocols.settings.run_settings import RunSettings
from fleetune.protocols.update.combine import Combine
from fleetune.protocols.update.encodings import RAW
from fleetune.protocols.wire.messages import TransferKey
from fleetune.protocols.wire.payloads import Enrolment, run_key


@dataclass(frozen=True)
class RunParts:
    """The parts of one run, built at each start.

    Attributes:
        settings: the run's settings.
        enrolment: what its devices start from.
        store: the run's store.
        state: state of the round engine.
        method: the method with its state.
        tasks: tasks of the open round.
        open_round: replies of the open round.
        accounts: counts of sent payloads.
        extensions: features of the run.
        aggregation: aggregates its updates.
        rows: writes state and ledger to the store.
    """

    settings: RunSettings
    enrolment: Enrolment
    store: RunStore
    state: EngineState
    method: MethodRun
    tasks: Tasks
    open_round: OpenRound
    accounts: Accounts
    extensions: Extensions
    aggregation: Aggregation
    rows: DeviceRows

    def count_delivered(self, device: DeviceId, transfer_key: TransferKey, num_bytes: int) -> None:
        """Count a payload that reached its device."""
        as_in_papers = partial(self.tasks.paper_bytes, device, RoundAttempt.of(transfer_key))
        self.accounts.delivered(device, transfer_key, num_bytes, as_in_papers)

    def recall(self, stored: EngineState | None) -> None:
        """Load all parts from the store.

        Args:
            stored: the engine's stored state; None for a new run.

        Raises:
            StoreError: the store is damaged.
        """
        self.accounts.ledger = read_ledger(self.store)
        if stored is None:
            return
        self.method.recall()
        self.extensions.recall()
        if self.tasks.downlink is not None:
            self.tasks.downlink.held.recall()
        self.open_round.recall(stored)

    def write(self) -> None:
        """Write all changes of engine, ledger, replies and method state. Call inside `store.step()`."""
        self.rows.write(self.state, self.accounts.ledger, self.accounts.take_touched())
        self.open_round.write(self.state.round_attempt)
        self.open_round.write_opened()
        self.method.write()

    def write_traffic(self) -> None:
        """Write the changed traffic counts. Call inside `store.step()`."""
        self.rows.write_traffic(self.accounts.ledger, self.accounts.take_touched())


def parts_of(
    settings: RunSettings,
    enrolment: Enrolment,
    method: Method[Any, Any, Any, Any],
    store: RunStore,
    state: EngineState,
    *,
    in_process: bool,
) -> RunParts:
    """Build the parts of a run.

    Args:
        settings: settings of the run.
        enrolment: initial data of its devices.
        method: method of the run.
        store: store of the run.
        state: state of the run's engine.
        in_process: True if the devices run in this process.
    """
    running = MethodRun(method, enrolment.weights, store)
    norms = UpdateNorms(method, lambda: running.state)
    noisy = _noisy(settings, state, in_process=in_process)
    combine = RoundCombine(settings.round, method, store.path.parent, noisy)
    extensions = extensions_of(RunContext(settings, enrolment.learns, method, store, state, norms, combine))
    outlive = settings.round.mode != "synchronous"
    downlink = _downlink(settings, enrolment, method, store, state, in_process=in_process)
    tasks = Tasks(store, method.spec, method.task_type, outlive, extensions.before_send, downlink)
    open_round = OpenRound(store, OpenReplies(store, method, in_memory=in_process))
    aggregation = Aggregation(running, extensions, norms, tasks, open_round, combine, compares=noisy is None)
    return RunParts(
        settings=settings,
        enrolment=enrolment,
        store=store,
        state=state,
        method=running,
        tasks=tasks,
        open_round=open_round,
        accounts=Accounts(),
        extensions=extensions,
        aggregation=aggregation,
        rows=DeviceRows(store),
    )


def _noisy(settings: RunSettings, state: EngineState, *, in_process: bool) -> Callable[[], Combine] | None:
    """Return a function that returns the noisy mean of the open round; None if [privacy] asks for none here.

    A simulation draws the noise from a key of the round, so that it can be repeated; a fleet never does.
    """
    section = settings.privacy
    if section is None or section.is_local:
        return None
    key = run_key(settings.run.seed).child("privacy")
    return lambda: noisy_mean(
        section, key.child(*state.round_attempt).normal if in_process else secret_normal
    )


def _downlink(
    settings: RunSettings,
    enrolment: Enrolment,
    method: Method[Any, Any, Any, Any],
    store: RunStore,
    state: EngineState,
    *,
    in_process: bool,
) -> Downlink | None:
    if enrolment.downlink.name == RAW:
        return None
    return Downlink(
        enrolment.downlink,
        method.spec,
        method.task_type,
        run_key(settings.run.seed),
        DeviceModels(store, method.spec, enrolment.weights),
        mask_time=lambda device: enrolment.mask_time(state.members[device].report, "down"),
        in_process=in_process,
    )
