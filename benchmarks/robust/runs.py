"""One run of the benchmark in the simulator, and what is measured at its end."""

import dataclasses
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.robust.attacks import TARGET, Attack, hostile_devices, poisoned, stamped
from benchmarks.robust.cells import CLEAN, HAR, Cell
from fleetune.coordinator.extensions import order
from fleetune.edge_agent.datasets.dataset import Dataset
from fleetune.edge_agent.datasets.sources import load
from fleetune.edge_agent.run.session import Session
from fleetune.edge_agent.state.agent_store import FileMemory
from fleetune.protocols.model.architectures import build
from fleetune.protocols.model.spec import FlatArray, ModelSpec
from fleetune.protocols.settings.run_settings import RunSettings
from fleetune.protocols.settings.run_toml import parse_run
from fleetune.protocols.wire.payloads import run_key
from fleetune.tools.simulator.caller_samples import CallerSamples
from fleetune.tools.simulator.marked_samples import splits_of
from fleetune.tools.simulator.runner import simulate

DEVICES, ROUNDS, SAMPLES = 20, 15, 500
LARGE_BATCHES = {"batch_size": 64, "learning_rate": 0.1}
SMALL_BATCHES = {"batch_size": 16, "learning_rate": 0.05}
ALPHAS = {"alpha-0.5": 0.5, "alpha-0.1": 0.1}


@dataclasses.dataclass(frozen=True)
class Data:
    """The devices' samples, and samples for the shared model's accuracy that no device has."""

    devices: Dataset
    test_x: NDArray[Any]
    test_y: NDArray[np.int64]


@cache
def data_of(setting: str, folder: Path) -> Data:
    """Return the samples of a setting, from the folder with the original files."""
    if setting == HAR:
        with np.load(folder / "uci_har" / "uci_har_inertial.npz") as file:
            halves, places = file["halves"], file["idx"]  # windows overlap by half
            x = np.concatenate([halves[places[:, 0]], halves[places[:, 1]]], axis=-1)
            y, person = file["y"].astype(np.int64), file["subject"]
        return Data(Dataset(x, y - y.min(), person), x[:0], y[:0])
    whole = load(f"idx:{folder / 'fashion-mnist'}", None)
    assert whole.test is not None, "the original files mark the test images"
    train = Dataset(whole.x[~whole.test], whole.y[~whole.test])
    return Data(train, whole.x[whole.test], whole.y[whole.test].astype(np.int64))


def settings_of(cell: Cell, data: Data) -> RunSettings:
    """Return the settings of a cell's run."""
    partition: dict[str, Any] = {"kind": "iid", "samples": SAMPLES, "test_fraction": 0.3}
    if cell.setting in ALPHAS:
        partition |= {"kind": "mix", "alpha": ALPHAS[cell.setting]}
    if cell.setting == HAR:
        partition = {"kind": "group", "test_fraction": 0.3}
    shape = list(data.devices.input_shape)
    group = data.devices.group
    devices = DEVICES if group is None else len(np.unique(group))
    pixels = {"mean": 0.2860, "std": 0.3530} if cell.setting != HAR else {}
    return parse_run(
        {
            "run": {"name": "robust", "rounds": ROUNDS, "seed": cell.seed},
            "model": {"name": "mlp", "input_shape": shape, "num_classes": int(data.devices.y.max()) + 1},
            "method": {"name": cell.method},
            "data": {"partition": partition, **pixels},
            "training": {"epochs": 2, **(SMALL_BATCHES if cell.setting == HAR else LARGE_BATCHES)},
            "round": {"robust": cell.rule, "max_hostile": cell.share or 0.2},
            "fleet": {"devices": devices, "trainer": "onnx"},
        }
    )


@contextmanager
def attacked(cell: Cell, hostile: list[str]) -> Iterator[None]:
    """Let hostile devices send forged updates."""
    before = order.ORDER
    Attack.hostile, Attack.attack = frozenset(hostile), cell.attack
    order.ORDER = (Attack, *before)
    try:
        yield
    finally:
        order.ORDER = before


def played(cell: Cell, data_folder: Path, runs: Path) -> dict[str, Any]:
    """Run a cell, and return its figures."""
    data = data_of(cell.setting, data_folder)
    settings = settings_of(cell, data)
    count, key = settings.fleet.devices, run_key(cell.seed).child("partition")
    numbers = hostile_devices(count, cell.share, cell.seed)
    splits = splits_of(data.devices, settings.data.partition, count, key, None)
    rows = tuple(splits[index] for index in range(count))
    samples = data.devices
    if cell.attack in ("label-flip", "backdoor"):
        taken = np.concatenate([rows[number][0] for number in numbers])
        samples = poisoned(samples, taken, cell.attack, cell.seed)
    given = CallerSamples(samples, rows)
    hostile = [f"device-{number:0{len(str(count - 1))}}" for number in numbers]
    folder = runs / cell.name.replace("/", "-")
    shutil.rmtree(folder, ignore_errors=True)
    with attacked(cell, hostile):
        run, summary = simulate(given.named_in(settings), folder, workers=0, fresh=True, caller_samples=given)
    try:
        found = _figures(cell, run, hostile, data)
        found |= {"rounds": summary.rounds, "refused": summary.refused}
    finally:
        run.store.close()
    shutil.rmtree(folder)
    return {**dataclasses.asdict(cell), **found}


def _figures(cell: Cell, run: Any, hostile: list[str], data: Data) -> dict[str, Any]:
    records = run.controller.records()
    last = records[-1].devices
    assert set(hostile) <= set(last), f"{hostile} are not in {sorted(last)}"
    honest = [device for device in last if device not in hostile]
    spec, model = run.enrolment.spec, run.settings.model
    module = build(model.name, tuple(model.input_shape), model.num_classes)
    found: dict[str, Any] = {
        "before": {device: _rounded(last[device].measures.before) for device in honest},
        "personal": {device: _rounded(last[device].measures.personal) for device in honest},
    }
    if data.test_y.size:
        mean_std = run.settings.data.mean, run.settings.data.std
        x, y = data.test_x, data.test_y
        shared = run.controller.shared_model
        found["accuracy"] = _rounded(float(np.mean(classes(module, spec, shared, x, mean_std) == y)))
        if cell.attack in (CLEAN, "backdoor"):
            others = stamped(x[y != TARGET])
            success = [
                float(np.mean(classes(module, spec, weights, others, mean_std) == TARGET))
                for weights in (shared, *(_personal(run, device) for device in _judged(cell, honest)))
            ]
            found["backdoor"] = _rounded(success[0])
            if success[1:]:
                found["backdoor_personal"] = _rounded(float(np.mean(success[1:])))
    steps = [(device, row.step) for record in records for device, row in record.devices.items() if row.step]
    for name, members in (("hostile", set(hostile)), ("honest", set(honest))):
        mine = [step for device, step in steps if device in members]
        found[f"ratio_{name}"] = _mean([one.ratio for one in mine])
        found[f"cosine_{name}"] = _mean([one.cosine for one in mine])
        found[f"outlying_{name}"] = _mean([float(one.is_outlying) for one in mine])
    return found


def _judged(cell: Cell, honest: list[str]) -> list[str]:
    return [] if cell.method == "fedavg" else honest


def _personal(run: Any, device: str) -> FlatArray:
    memory = FileMemory(run.folder / "devices" / f"{device}.state")
    trainer: Any = None  # it only reads
    return Session(run.enrolment, device, run.method, trainer, memory).personal_model


def _mean(figures: list[float | None]) -> float | None:
    known = [one for one in figures if one is not None]
    return _rounded(float(np.mean(known))) if known else None


def _rounded(figure: float | None) -> float | None:
    return None if figure is None else round(figure, 5)


def classes(
    module: torch.nn.Module,
    spec: ModelSpec,
    weights: FlatArray,
    x: NDArray[Any],
    mean_std: tuple[float, float],
) -> NDArray[np.int64]:
    """Return the class that the model gives each sample."""
    state = {tensor.name: torch.from_numpy(view.copy()) for tensor, view in spec.views(weights)}
    module.load_state_dict(state, strict=False)
    module.eval()
    inputs = x.astype(np.float32) / (255 if x.dtype.kind == "u" else 1)
    inputs = (inputs - mean_std[0]) / mean_std[1]
    with torch.no_grad():
        found: NDArray[np.int64] = module(torch.from_numpy(inputs.astype(np.float32))).argmax(dim=1).numpy()
    return found
