"""edge-agent add and samples: putting samples in by hand, and looking at what is kept."""

import json
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fleetune.edge_agent.run_options import DeviceName, LabelColumns, StateFolder
from fleetune.edge_agent.state.defaults import HOST, STATE, TEST_FRACTION
from fleetune.protocols.one_line import one_line_errors

if TYPE_CHECKING:
    from fleetune.edge_agent.stream.sample import Sample
    from fleetune.edge_agent.stream.sample_store import SampleStore
    from fleetune.edge_agent.stream.status import Status

Fleet = Annotated[str, typer.Option(help="name of the fleet")]
_BATCH = 64


def add(
    file: Annotated[
        str,
        typer.Argument(help="CSV, Parquet, .npz or an image; - reads a line of JSON a sample: x, y, id"),
    ],
    fleet: Fleet,
    device: DeviceName = HOST,
    state: StateFolder = STATE,
    label_column: LabelColumns = "label",
    label: Annotated[str | None, typer.Option(help="of all samples in a file that has none itself")] = None,
) -> None:
    """Put samples into this device's store, whose agent may run or not."""
    from fleetune.edge_agent.state.agent_store import AgentStore
    from fleetune.edge_agent.state.state_folder import mark
    from fleetune.edge_agent.stream.sample_store import SampleStore

    with one_line_errors("edge-agent"):
        mark(state / fleet / device)
        store = SampleStore.open(AgentStore(state / fleet / device).samples)
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
    from fleetune.edge_agent.stream.intakes.messages import MAX_MESSAGE_BYTES, read_message

    while line := sys.stdin.buffer.readline(MAX_MESSAGE_BYTES):
        if not line.strip():
            continue
        message = read_message(line, as_json=True)
        if message.problem is not None:
            store.refuse(message.problem)
        elif message.sample is not None:
            yield from store.add([message.sample])
        elif message.label is not None:
            yield from store.label([(str(message.id), message.label)])


def _from_file(store: "SampleStore", path: Path, columns: str, label: str | None) -> Iterator[str]:
    from fleetune.edge_agent.stream.decoding.decoder_process import DecoderProcess, NeedsPackage
    from fleetune.edge_agent.stream.intakes.sample_files import ReadOptions
    from fleetune.edge_agent.stream.sample import BadSample
    from fleetune.protocols.errors import DataError

    feed = store.table_columns()
    names = tuple(one.strip() for one in columns.split(",") if one.strip())
    decoder = DecoderProcess()
    reading = ReadOptions(store.refuse, decoder, names, columns=() if feed is None else feed.columns)
    try:
        yield from _kept(store, _samples(path, reading, None if label is None else reading.label(label)))
    except (NeedsPackage, BadSample) as problem:
        raise DataError(str(problem)) from None
    finally:
        decoder.close()


def _samples(path: Path, reading: Any, label: float | None) -> "Iterator[Sample]":
    from fleetune.edge_agent.stream.intakes import sample_files as files
    from fleetune.edge_agent.stream.sample import make_sample

    match path.suffix.lower():
        case ".csv":
            yield from files.CsvLines(path, reading, label).samples(last=True)
        case ".parquet":
            yield from files.read_parquet(path, reading, label)
        case ".npz":
            yield from files.read_shard(path, reading, label)
        case suffix if suffix in files.IMAGES:
            yield make_sample(files.read_image(path, reading), label)
        case suffix:
            raise files.BadFile(
                f"{path}: {suffix or 'a file without ending'} is not known; expected .csv,"
                " .parquet, .npz or an image"
            )


def _kept(store: "SampleStore", samples: "Iterable[Sample]") -> Iterator[str]:
    batch: list[Sample] = []
    for sample in samples:
        batch.append(sample)
        if len(batch) == _BATCH:
            yield from store.add(batch)
            batch = []
    yield from store.add(batch)


def samples(
    fleet: Fleet,
    device: DeviceName = HOST,
    state: StateFolder = STATE,
    test_fraction: Annotated[
        float, typer.Option(min=0.01, max=0.99, help="as given to run: which samples are tested on")
    ] = TEST_FRACTION,
    as_json: Annotated[bool, typer.Option("--json", help="for scripts")] = False,
) -> None:
    """Show what is kept of this device's stream: how many samples of what, how old, and what was refused."""
    from fleetune.edge_agent.state.agent_store import AgentStore
    from fleetune.edge_agent.stream.sample_store import SampleStore
    from fleetune.edge_agent.stream.status import status
    from fleetune.protocols.errors import StoreError

    with one_line_errors("edge-agent"):
        path = AgentStore(state / fleet / device).samples
        if not path.exists():
            raise StoreError(f"{path}: no samples are kept here; docs/streams.md says how")
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
