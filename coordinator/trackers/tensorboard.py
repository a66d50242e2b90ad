"""TensorBoard: an event file in each run's folder, so that `tensorboard --logdir runs` shows all runs.

The event file of a continued run is written again from its rounds, so that no point is duplicated or missing.
A viewer that is open at that moment sees the older points disappear and return.
"""

import os
import socket
import time
from typing import Any

from tensorboard.compat.proto import event_pb2, summary_pb2, tensor_pb2, tensor_shape_pb2, types_pb2
from tensorboard.plugins.hparams.summary_v2 import hparams_pb
from tensorboard.plugins.text import metadata
from tensorboard.summary.writer.record_writer import RecordWriter

from fleetune.coordinator.trackers.tracker import Outcome, Parameter, RoundFigures, TrackedRun

OURS = "events.out.tfevents.*.fleetune"


class TensorBoard:
    """Writes one run's event file; `hear` flushes each round to the disk."""

    def __init__(self, run: TrackedRun) -> None:
        first = run.before[0].number if run.before else 1
        if first == 1:
            for path in run.folder.glob(OURS):
                path.unlink()
        second, rest = divmod(time.time_ns(), 10**9)  # TensorBoard reads files in alphabetical order
        name = f"events.out.tfevents.{second:010d}.{socket.gethostname()}.{os.getpid()}.{rest:09d}.fleetune"
        self._file = (run.folder / name).open("xb")
        self._records = RecordWriter(self._file)
        self._newest = 0
        self._write(file_version="brain.Event:2")
        self._purge(first)
        self._write(summary=_settings(run))
        self._write(summary=hparams_pb(dict(run.parameters), trial_id=run.name))
        for figures_of_round in run.before:
            self._add(figures_of_round)
        self._file.flush()

    def hear(self, figures_of_round: RoundFigures) -> None:
        """Write a round's figures."""
        if figures_of_round.number <= self._newest:
            self._purge(figures_of_round.number)
        self._add(figures_of_round)
        self._file.flush()

    def finish(self, outcome: Outcome) -> None:
        """Write the run's result."""
        self._write(step=outcome.rounds, summary=_scalars(outcome.figures))

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _add(self, figures_of_round: RoundFigures) -> None:
        self._newest = figures_of_round.number
        self._write(step=figures_of_round.number, summary=_scalars(figures_of_round.figures))

    def _purge(self, step: int) -> None:
        """Mark all points of this step and later ones as invalid."""
        start = event_pb2.SessionLog.START
        self._write(step=step, session_log=event_pb2.SessionLog(status=start))

    def _write(self, **content: Any) -> None:
        event = event_pb2.Event(wall_time=time.time(), **content)
        self._records.write(event.SerializeToString())


def _scalars(figures: Any) -> Any:
    value = summary_pb2.Summary.Value
    return summary_pb2.Summary(value=[value(tag=name, simple_value=one) for name, one in figures.items()])


def _settings(run: TrackedRun) -> Any:
    """Return the settings as a table for TensorBoard's text tab."""
    rows = "\n".join(f"| {key} | {_cell(value)} |" for key, value in sorted(run.parameters.items()))
    text = f"| setting | value |\n|---|---|\n{rows}\n"
    content = tensor_pb2.TensorProto(
        dtype=types_pb2.DT_STRING,
        tensor_shape=tensor_shape_pb2.TensorShapeProto(dim=[tensor_shape_pb2.TensorShapeProto.Dim(size=1)]),
        string_val=[text.encode()],
    )
    about = metadata.create_summary_metadata(display_name="settings", description="")
    value = summary_pb2.Summary.Value(tag="settings", metadata=about, tensor=content)
    return summary_pb2.Summary(value=[value])


def _cell(value: Parameter) -> str:
    return str(value).replace("|", "\\|")
