"""`edge-coordinator export`: writes a bundle to a file and describes it."""

import re
import time
from dataclasses import dataclass, replace
from pathlib import Path

from msgspec import UNSET, UnsetType
from rich.table import Table

from fleetune.coordinator.run.models import find_model, make_run_bundle
from fleetune.coordinator.run.starting_weights import start_of
from fleetune.protocols.bundle.bundle import MAX_BYTES, Bundle
from fleetune.protocols.bundle.onnx_file import write_onnx
from fleetune.protocols.errors import SettingError
from fleetune.protocols.files import write_atomically
from fleetune.protocols.model.backbone_file import backbone_file, backbone_file_bytes
from fleetune.protocols.model.spec import Backbone
from fleetune.protocols.settings.run_settings import RunSettings
from fleetune.protocols.settings.run_toml import parse_run, read_run
from fleetune.protocols.wire.transfer import digest_of


@dataclass(frozen=True)
class Written:
    """A bundle that was written.

    Attributes:
        bundle: the bundle.
        path: the file.
        num_bytes: the size of the file.
        digest: the digest by which agents know the bundle.
        seconds: the time to make and check the bundle.
    """

    bundle: Bundle
    path: Path
    num_bytes: int
    digest: str
    seconds: float


def settings_for(
    model: str, input_shape: str | None, classes: int | None, seed: int, changes: list[str]
) -> RunSettings:
    """Settings of a run that name the model to export.

    Args:
        model: the name of a model, or the path of a run's settings.
        input_shape: the shape of one sample, such as "1x28x28"; None if the settings give it.
        classes: the number of classes; None if the settings give it.
        seed: the seed of the run, if `model` is a name.
        changes: changes to settings, see `read_run`.

    Raises:
        SettingError: the shape is missing or is not a shape.
    """
    if model.endswith(".toml"):
        changes = [*changes, *([f"model.input_shape={list(_sizes(input_shape))}"] if input_shape else [])]
        changes += [f"model.num_classes={classes}"] if classes else []
        return read_run(Path(model), changes)
    if input_shape is None or classes is None:
        raise SettingError(
            "export: give the shape of a sample and the classes, e.g. --input 1x28x28 --classes 10"
        )
    section = {"name": model, "input_shape": list(_sizes(input_shape)), "num_classes": classes}
    run = {"name": "export", "seed": seed}
    return parse_run({"run": run, "model": section, "method": {"name": "fedavg"}})


def _sizes(text: str) -> tuple[int, ...]:
    sizes = re.split(r"[x,]", text)
    if not all(size.isdecimal() and int(size) for size in sizes):
        raise SettingError(f"--input {text}: write the shape of one sample as 1x28x28")
    return tuple(map(int, sizes))


def write_bundle(settings: RunSettings, out: Path | None, onnx: Path | None) -> Written:
    """Make a bundle and write it to a file.

    Args:
        settings: settings that name the model.
        out: the file; None for a file named after the model in the current folder.
        onnx: a folder for the graphs as ONNX files; None to write none.

    Raises:
        ModelError: the model cannot be built or exported, or its weights cannot be read.
        StoreError: a file cannot be written.
    """
    began = time.monotonic()
    bundle = _with_weights(make_run_bundle(settings), settings)
    seconds = time.monotonic() - began
    data = bundle.encoded()
    path = out or Path(f"{bundle.spec.name.replace(':', '.').replace('/', '-')}.bundle")
    write_atomically(path, data, mode=None)
    if onnx is not None:
        for name, graph in bundle.graphs.items():
            write_atomically(onnx / f"{name}.onnx", write_onnx(graph), mode=None)
    return Written(bundle, path, len(data), digest_of(data), seconds)


def _with_weights(bundle: Bundle, settings: RunSettings) -> Bundle:
    """Return the bundle with the weights that [model] names, frozen layers included if they fit."""
    if settings.model.weights is None:
        return bundle
    start = start_of(settings, find_model(settings), Path("runs"))
    backbone = bundle.spec.backbone
    frozen: bytes | UnsetType = UNSET
    if isinstance(backbone, Backbone) and backbone_file_bytes(backbone) <= MAX_BYTES // 2:
        frozen = backbone_file(backbone, start.frozen)
    return replace(bundle, weights=start.weights, recipe=None, frozen=frozen)


def bundle_table(written: Written) -> Table:
    """Return a table of the graphs in a bundle."""
    table = Table("graph")
    table.add_column("operators", justify="right")
    table.add_column("as ONNX", justify="right")
    for name, graph in written.bundle.graphs.items():
        table.add_row(name, str(len(graph.nodes)), f"{len(write_onnx(graph)) / 1e3:.1f} kB")
    return table


def bundle_summary(written: Written) -> str:
    """Lines about the model, its first weights and the file."""
    bundle, spec = written.bundle, written.bundle.spec
    shape = "x".join(map(str, spec.input_shape))
    first = "are drawn without torch, for any seed" if bundle.recipe else "are inside"
    also = "; for onnxruntime-training too" if bundle.ort_training else ""
    return (
        f"{spec.name}: {spec.num_parameters:,} parameters, input {shape}, {spec.num_classes} classes\n"
        f"every graph was compared with torch{also}; first weights {first}\n"
        f"{written.path}: {written.num_bytes:,} bytes, {written.digest}, made in {written.seconds:.1f} s"
    )
