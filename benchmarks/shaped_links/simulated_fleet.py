"""The simulated run of a run.toml."""

from collections.abc import Sequence
from pathlib import Path

from fleetune.coordinator.rounds.records import RoundRecord
from fleetune.protocols.settings.run_toml import read_run
from fleetune.tools.simulator.runner import simulate


def simulated(run_file: Path, changes: Sequence[str], folder: Path, workers: int) -> list[RoundRecord]:
    """Return the rounds of a simulated run without the final evaluation.

    Raises:
        FleetuneError: see `runner.simulate`.
    """
    run, _ = simulate(read_run(run_file, changes), folder, workers=workers, fresh=True)
    try:
        return [one for one in run.controller.records() if not one.final_evaluation]
    finally:
        run.store.close()
