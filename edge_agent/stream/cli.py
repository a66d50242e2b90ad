"""The commands `edge-agent add` and `edge-agent samples`: store samples by hand, and show the stored ones."""

import json
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fleetune.edge_agent.run_options import DeviceId, Fleet, LabelColumns, StateFolder
from fleetune.edge_agent.state.defaults import STATE, TEST_FRACTION
from fleetune.protocols.one_line import one_line_errors

if TYPE_CHECKING:
    from fleetune.edge_agent.stream.sample_store import SampleStore
    from fleetune.edge_agent.stream.status import Status


def add(
    file: Annotated[
        str,
        typer.Argument(help="CSV file, .npz file or image; - reads one sample per line of JSON: x, y, id"),
    ],
    fleet: Fleet = None,
    device: DeviceId = None,
    state: StateFolder = STATE,
    label_column: LabelColumns = "label",
    label: Annotated[str | None, typer.Option(help="label of every sample of a file without labels")] = None,
) -> None:
    """Store samples of a file on this device, while its agent runs or not."""
    from fleetune.edge_agent.state.agent_store import AgentStore
    from fleetune.edge_agent.state.state_folder import mark
    from fleetune.edge_agent.stream.sample_store import SampleStore

    with one_line_errors("edge-agent"):
        agent_store = AgentStore.of(state, fleet, device)
        mark(agent_store.folder)
        store = SampleStore.open(agent_store.samples)
        try:
            before = _refused(store)
            found = _from_lines(store) if file == "-" else _from_file(store, Path(file), label_column, label)
            counts = Counter[str](found)
            store.save_counts()
            refused = {kind: count - before.get(kind, 0) for kind, count in _refused(store).items()}
        finally:
            store.close()
        del counts["refused"]
        words = [f"{counts[what]} {what}" for what in ("stored", "labelled", "known") if counts[what]]
        bad = [f"{count} refused ({kind})" for kind, count in refused.items() if count]
        print(f"{file}: {', '.join([*words, *bad]) or 'no samples'}")


def _refused(store: "SampleStore") -> dict[str, int]:
    from fleetune.edge_agent.stream.status import refused

    return refused(store)


def _from_lines(store: "SampleStore") -> Iterator[str]:
    from fleetune.edge_agent.stream.intakes.messages import MAX_MESSAGE_BYTES, read_message, store_messages

    while line := sys.stdin.buffer.readline(MAX_MESSAGE_BYTES):
        if not line.strip():
            continue
        message = read_message(line, as_json=True)
        if message.problem is not None:
            store.refuse(message.problem)
        yield from (outcome for outcome in store_messages(store, [message]) if outcome is not None)


def _from_file(store: "SampleStore", path: Path, columns: str, label: str | None) -> Iterator[str]:
    from fleetune.edge_agent.datasets.audio import SOUND
    from fleetune.edge_agent.stream.decoding.decoder_process import DecoderProcess
    from fleetune.edge_agent.stream.intakes.sample_files import (
        NeedsPackage,
        ReadOptions,
        read_samples,
        store_file,
    )
    from fleetune.edge_agent.stream.sample import BadSample
    from fleetune.protocols.errors import DataError

    if path.suffix.lower() == SOUND:  # the options of sounds (rate, seconds) belong to a watched folder
        raise DataError(f"{path}: sounds can only come from a watched folder; see docs/streams.md")
    table = store.table_columns()
    names = tuple(one.strip() for one in columns.split(",") if one.strip())
    decoder = DecoderProcess()
    reading = ReadOptions(store.refuse, decoder, names, columns=() if table is None else table.columns)
    try:
        number = None if label is None else reading.label(label)
        yield from store_file(store, read_samples(path, reading, number))
    except (NeedsPackage, BadSample) as problem:
        raise DataError(str(problem)) from None
    finally:
        decoder.close()


def samples(
    fleet: Fleet = None,
    device: DeviceId = None,
    state: StateFolder = STATE,
    test_fraction: Annotated[
        float,
        typer.Option(
            min=0.01,
            max=0.99,
            help="the --test-fraction of edge-agent run, which decides which samples are test samples",
        ),
    ] = TEST_FRACTION,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON, for scripts")] = False,
) -> None:
    """Show the samples stored on this device: how many of each class, their age, and what was refused."""
    from fleetune.edge_agent.state.agent_store import AgentStore
    from fleetune.edge_agent.stream.sample_store import SampleStore
    from fleetune.edge_agent.stream.status import status
    from fleetune.protocols.errors import StoreError

    with one_line_errors("edge-agent"):
        path = AgentStore.of(state, fleet, device).samples
        if not path.exists():
            raise StoreError(f"{path}: no samples are stored here; see docs/streams.md")
        store = SampleStore.open(path)
        try:
            found = status(store, test_fraction)
        finally:
            store.close()
        if as_json:
            print(json.dumps(found.as_dict()))
        else:
            _show(found)


def _show(found: "Status") -> None:
    import rich
    from rich.table import Table

    table = Table("class", "to train on", "to test on", "MB")
    for row in found.classes:
        table.add_row(row.name, f"{row.train:,}", f"{row.test:,}", f"{row.num_bytes / 1e6:.1f}")
    rich.print(table)
    for line in found.lines():
        print(line)
