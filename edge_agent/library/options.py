"""The options of an `Agent`, and the checks on them before the child process starts."""

import os
import sys
import time
from pathlib import Path
from typing import IO, Any, TypedDict

from fleetune.edge_agent.joining.membership import BrokerOptions
from fleetune.edge_agent.state.agent_store import AgentStore
from fleetune.edge_agent.stream.sample_stream import is_stream
from fleetune.protocols.errors import SettingError, StoreError, StoreVersion
from fleetune.protocols.one_line import without_url

_POLL_S = 0.1


class AgentOptions(TypedDict, total=False):
    """Options with the names and meanings of `edge-agent run`; `edge-agent run --help` explains each."""

    name: str | None
    board: str
    policy: Path | str | None
    ratio: float | None
    charging_only: bool | None
    unmetered_only: bool | None
    max_celsius: float | None
    min_battery: float | None
    max_battery_percent_per_hour: float | None
    max_memory_mb: float | None
    nice: int | None
    test_fraction: float
    keep_mb: float | None
    keep_days: float | None
    keep: str | None
    keep_balanced: bool | None
    keep_unlabelled: float | None
    label_column: str
    trainer: str
    train_on: str
    threads: int
    trust: list[str]
    ca: str | None
    cert: str | None
    key: str | None
    root: Path | str
    publish: Path | str | None
    publish_mode: str | None


def check_options(
    broker: str | None, fleet: str | None, device: str, store: Path, data: str, options: AgentOptions
) -> dict[str, Any]:
    """Check the options as far as possible without a process, and return the fields of `RunOptions`.

    Raises:
        SettingError: an option is wrong.
        DataError: `data` names a module that cannot be imported.
    """
    if sys.platform == "win32":
        raise SettingError("Agent: its child process needs Linux or macOS; use edge-agent run and an Intake")
    where = os.environ.get("FLEETUNE_BROKER") if broker is None else broker
    unknown = sorted(set(options) - set(AgentOptions.__annotations__))
    if unknown:
        raise SettingError(f"Agent: unknown option {unknown[0]}; edge-agent run --help lists the options")
    given = dict(options)
    tls = {name: options.get(name) for name in ("ca", "cert", "key")}
    member = BrokerOptions(fleet, where, device, store, **tls).membership()  # type: ignore[arg-type]
    if not is_stream(data):
        raise SettingError(
            f"Agent: data {without_url(data)!r} is not a stream; leave it out, or see docs/streams.md"
        )
    return {
        **given,
        "broker": where,
        "fleet": member.fleet,
        "device": device,
        "state": str(store),
        "data": data,
    }


def claim(store: AgentStore, patience_s: float) -> IO[bytes]:
    """Lock the state folder, and return the lock file.

    Raises:
        StoreError: another agent holds it, or it cannot be written.
        StoreVersion: it has another format.
    """
    give_up_at = time.monotonic() + patience_s
    while True:
        try:
            return store.claim()
        except StoreVersion:
            raise
        except StoreError:
            if time.monotonic() > give_up_at:
                raise
            time.sleep(_POLL_S)
