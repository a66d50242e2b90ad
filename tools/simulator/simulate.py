"""`fleetune.simulate`: a whole simulated run from Python, as `edge-sim run` plays it, without a screen."""

from pathlib import Path

from fleetune.coordinator.reports.summary import Summary
from fleetune.protocols.settings.run_settings import RunSettings
from fleetune.tools.simulator import runner


def simulate(
    settings: RunSettings, runs: Path | str = "runs", *, workers: int = 0, fresh: bool = False
) -> Summary:
    """Simulate a run and leave its report, weights and pictures in `runs`/<name>; what it came to.

    Args:
        settings: of the run, e.g. of `fleetune.read_run`.
        runs: the folder of runs.
        workers: processes that train devices, one torch thread each; 0: none but this one. With some, a
            script calls this under `if __name__ == "__main__":`.
        fresh: replace what an earlier run of this name left.

    Returns:
        The content of its summary.json.

    Raises:
        FleetuneError: settings, data or model are wrong, or there is such a run.
        StoreError: the disk is full.
    """
    run, summary = runner.simulate(settings, Path(runs) / settings.run.name, workers=workers, fresh=fresh)
    runner.leave(run, summary)
    return summary
