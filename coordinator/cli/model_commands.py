"""edge-coordinator weights and export: models as files."""

from pathlib import Path
from typing import Annotated

import typer

from fleetune.coordinator.cli.options import Changes, RunFolder
from fleetune.protocols.one_line import one_line_errors


def weights(
    folder: RunFolder, out: Annotated[Path, typer.Argument(help="the .safetensors file to write")]
) -> None:
    """Write a run's shared model, as it stands, as safetensors."""
    from fleetune.coordinator.run.stored_run import look_at, save_shared_model

    with one_line_errors("edge-coordinator"), look_at(folder) as run:
        print(save_shared_model(run, out))


def export(
    model: Annotated[
        str, typer.Argument(help="a built-in model, package.module:function, or a run's settings (.toml)")
    ],
    input_shape: Annotated[
        str | None, typer.Option("--input", help="shape of one sample, e.g. 1x28x28")
    ] = None,
    classes: Annotated[int | None, typer.Option(min=2, help="number of classes")] = None,
    out: Annotated[
        Path | None, typer.Option(help="file to write; default: MODEL.bundle in the current folder")
    ] = None,
    onnx: Annotated[
        Path | None,
        typer.Option(help="folder for the bundle's graphs as ONNX files, to view them (e.g. in Netron)"),
    ] = None,
    seed: Annotated[
        int, typer.Option(help="seed of the first weights, for models whose weights only torch can draw")
    ] = 0,
    changes: Changes = [],  # noqa: B006 - typer's way of saying it
) -> None:
    """Turn a model into a bundle: agents train it, and coordinators serve it, without torch.

    Every graph in it is compared with torch's own gradients before it is written.
    """
    import rich

    from fleetune.coordinator.bundle_file import bundle_summary, bundle_table, settings_for, write_bundle

    with one_line_errors("edge-coordinator"):
        settings = settings_for(model, input_shape, classes, seed, changes)
        written = write_bundle(settings, out, onnx)
        rich.print(bundle_table(written))
        print(bundle_summary(written))
