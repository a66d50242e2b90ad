"""Turns the options of `edge-agent run` into a sample stream, for a device whose data grow."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

from msgspec.structs import fields

from fleetune.edge_agent.run_options import RunOptions
from fleetune.edge_agent.state.agent_store import AgentStore
from fleetune.edge_agent.stream.retention import RetentionLimits
from fleetune.edge_agent.stream.sample_stream import (
    SampleStream,
    StreamSettings,
    check_stream,
    is_stream,
    open_stream,
)
from fleetune.protocols.errors import SettingError
from fleetune.protocols.settings.run_toml import convert


def stream_maker(
    options: RunOptions, state: Path, memory_bytes: int | None
) -> Callable[[], SampleStream] | None:
    """Return a function that opens the device's growing samples; None if its data do not grow.

    Raises:
        DataError: there are no such data.
        SettingError: an option is wrong, or needs data that grow.
    """
    given = {one.name: getattr(options, one.name) for one in fields(RetentionLimits)}
    asked = {name: value for name, value in given.items() if value is not None}
    if not is_stream(options.data):
        if asked:
            option = next(iter(asked)).replace("_", "-")
            raise SettingError(
                f"--{option} works only with data that grow: --data watch:FOLDER, mqtt://, intake: or a"
                " generator"
            )
        return None
    check_stream(options.data)
    labels = tuple(one.strip() for one in options.label_column.split(",") if one.strip())
    settings = StreamSettings(convert(asked, RetentionLimits), labels, memory_bytes)
    return partial(open_stream, AgentStore(state).samples, options.data, settings)
