"""edge-agent export and predict: this device's model for the app on it."""

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fleetune.edge_agent.run_options import DeviceId, Fleet, StateFolder
from fleetune.edge_agent.state.defaults import STATE
from fleetune.protocols.one_line import one_line_errors

if TYPE_CHECKING:
    from fleetune.edge_agent.extensions.adoption.deployed_model import ModelRecord
    from fleetune.edge_agent.personal.predictions import Predictions

Run = Annotated[str | None, typer.Option(help="id of a run whose model to use; default: the deployed model")]
BundleFile = Annotated[
    Path | None,
    typer.Option(help="bundle from edge-coordinator export; needed on a device that trains with torch"),
]
Trust = Annotated[
    list[str], typer.Option(help="package.module of your own that the run names; may be repeated")
]
_ROWS = 10


def export(
    out: Annotated[Path, typer.Option(help="the .onnx file to write")],
    fleet: Fleet = None,
    device: DeviceId = None,
    state: StateFolder = STATE,
    run: Run = None,
    bundle: BundleFile = None,
    trust: Trust = [],  # noqa: B006 - typer's way of saying it
) -> None:
    """Write this device's personal model as an ONNX file that turns raw samples into the task's answers."""
    from fleetune.edge_agent.personal.personal_model import personal_model
    from fleetune.edge_agent.personal.publishing import onnx_of
    from fleetune.edge_agent.state.agent_store import AgentStore
    from fleetune.protocols.files import write_atomically

    with one_line_errors("edge-agent"):
        store = AgentStore.of(state, fleet, device)
        found = personal_model(store, run, bundle, trusted=tuple(trust))
        written = onnx_of(found, store.device)
        write_atomically(out, written, mode=None)
        print(
            f"{out}: {found.bundle.spec.name} of {store.device}, {len(written):,} bytes; {found.record.words}"
        )


def predict(
    data: Annotated[str, typer.Option(help="samples: a source as in run, or FILE.npy without labels")],
    model: Annotated[
        Path | None, typer.Option(help="model from edge-agent export; default: this device's own")
    ] = None,
    fleet: Fleet = None,
    device: DeviceId = None,
    state: StateFolder = STATE,
    run: Run = None,
    bundle: BundleFile = None,
    trust: Trust = [],  # noqa: B006 - typer's way of saying it
    as_json: Annotated[bool, typer.Option("--json", help="print all samples as JSON")] = False,
) -> None:
    """Predict samples with the personal model, and score it if labels are known."""
    from fleetune.edge_agent.joining.joined_fleet import joined_fleets
    from fleetune.edge_agent.personal.deployed_predictor import predictor_of
    from fleetune.edge_agent.personal.inference_graph import Predictor
    from fleetune.edge_agent.personal.personal_model import personal_model
    from fleetune.edge_agent.personal.predictions import predictions_of
    from fleetune.edge_agent.state.agent_store import AgentStore
    from fleetune.protocols.errors import SettingError

    with one_line_errors("edge-agent"):
        if model is None and fleet is None and not joined_fleets(state):
            raise SettingError(
                "predict: no model; give --model FILE.onnx, or the --fleet whose model this device has"
            )
        x, y = _samples(data)
        record = None
        if model is None:
            found = personal_model(AgentStore.of(state, fleet, device), run, bundle, trusted=tuple(trust))
            predictor, record = predictor_of(found), found.record
        else:
            predictor = Predictor.of(model)
        predictions = predictions_of(predictor, x, y, data)
        if as_json:
            from fleetune.edge_agent.personal.publishing import about_record

            said = {**predictions.as_json(), "model": None if record is None else about_record(record)}
            sys.stdout.write(json.dumps(said) + "\n")
        else:
            _show(predictions, record)


def _samples(source: str) -> tuple[Any, Any]:
    """Inputs, and labels if there are any."""
    from fleetune.edge_agent.datasets.npy_arrays import read_npy
    from fleetune.edge_agent.datasets.sources import load
    from fleetune.protocols.errors import DataError

    if not source.endswith(".npy"):
        dataset = load(source, None)
        return dataset.x, dataset.y
    try:
        x = read_npy(Path(source))
    except DataError as problem:
        raise DataError(f"cannot read {problem}") from None
    if x.ndim < 2 or not len(x):
        raise DataError(f"{source}: shape {x.shape}; expected (samples, ...) with at least one sample")
    return x, None


def _show(predictions: "Predictions", record: "ModelRecord | None") -> None:
    import rich
    from rich.table import Table

    if record is not None:
        print(f"model: {record.words}")
    table = Table("sample", *predictions.columns)
    for index, row in enumerate(predictions.rows(_ROWS)):
        table.add_row(str(index), *row)
    rich.print(table)
    if predictions.num_samples > _ROWS:
        print(f"... and {predictions.num_samples - _ROWS} more; --json has them all")
    for line in predictions.lines():
        print(line)
