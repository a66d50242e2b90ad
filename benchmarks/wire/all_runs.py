"""All runs of the wire benchmark: it executes missing runs and writes tables of all runs."""

import json
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path

from rich.console import Console
from rich.progress import Progress

from benchmarks.recorded_updates import Fleet as PatchFleet
from benchmarks.recorded_updates import updates_of
from benchmarks.rival_environments import NotInstalled
from benchmarks.wire import rate_distortion
from benchmarks.wire.fleet import SETTINGS, Fleet, Setting
from benchmarks.wire.report import written
from benchmarks.wire.run import OWN_TRAINING, Configuration, Run, run_to_end, save, saved
from benchmarks.wire.senders import SENDERS
from fleetune.protocols.errors import SettingError
from fleetune.protocols.files import write_atomically

NO_SETTING = "none"
STEPS_OF_CNN = PatchFleet(model="cnn-kapc", devices=2, samples=500, rounds=4)


@dataclass(frozen=True)
class Wanted:
    """Options of the command line, see `benchmarks.wire.__main__`."""

    out: Path
    settings: str
    seeds: int
    only: str
    rate: float
    momentum: float
    rounds: int | None
    data: str | None
    steps: bool


def run_all(wanted: Wanted, console: Console) -> None:
    """Run what is missing and write the results of all runs.

    Raises:
        SettingError: unknown setting or configuration.
    """
    chosen = _settings(wanted.settings, wanted.rounds, wanted.data)
    configurations = [_configuration(name, wanted) for name in _names(wanted.only)]
    if Configuration("dense") not in configurations:
        configurations.insert(0, Configuration("dense"))
    if wanted.steps:
        _measure_steps(wanted.out, console)
    if not chosen:
        return
    _run_missing(chosen, configurations, wanted.seeds, wanted.out, console)
    console.print(written(_all_runs(chosen, wanted.out), wanted.out), markup=False, soft_wrap=True)


def _measure_steps(out: Path, console: Console) -> None:
    """Write steps.md and steps.json: a device's update in the first round (hot) and the last (calm)."""
    sent = list(updates_of("fedavg", STEPS_OF_CNN))
    steps = {"hot": sent[:1], "calm": sent[-STEPS_OF_CNN.devices :][:1]}
    tables = {sort: rate_distortion.measured(patches) for sort, patches in steps.items()}
    try:
        for sort, patches in steps.items():
            tables[sort] |= rate_distortion.measured_nnc(patches, out / "environments")
    except NotInstalled as problem:
        console.print(f"without NNCodec: {problem}", markup=False, soft_wrap=True)
    table = rate_distortion.markdown(tables)
    write_atomically(out / "steps.json", json.dumps(tables, indent=1).encode(), mode=None)
    write_atomically(out / "steps.md", table.encode(), mode=None)
    console.print(table, markup=False, soft_wrap=True)


def _settings(names: str, rounds: int | None, data: str | None) -> dict[str, Setting]:
    chosen: dict[str, Setting] = {}
    for name in [] if names == NO_SETTING else names.split(","):
        if name not in SETTINGS:
            raise SettingError(f"--settings: unknown {name!r}; known: {', '.join([*SETTINGS, NO_SETTING])}")
        chosen[name] = SETTINGS[name]
    if data is not None and len(chosen) > 1:
        raise SettingError("--data goes with one of --settings")
    changes = {"rounds": rounds, "source": data}
    given = {key: value for key, value in changes.items() if value is not None}
    return {name: replace(setting, **given) for name, setting in chosen.items()}  # type: ignore[arg-type]


def _names(only: str) -> list[str]:
    known, patterns = [*SENDERS, *OWN_TRAINING], only.split(",")
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in known):
            raise SettingError(f"--only: unknown {pattern!r}; known: {', '.join(known)}")
    return [name for name in known if any(fnmatchcase(name, pattern) for pattern in patterns)]


def _configuration(name: str, wanted: Wanted) -> Configuration:
    """A configuration; one with its own training has no damping."""
    return Configuration(name) if name in OWN_TRAINING else Configuration(name, wanted.rate, wanted.momentum)


def _run_missing(
    settings: dict[str, Setting], configurations: list[Configuration], seeds: int, out: Path, console: Console
) -> None:
    with Progress(console=console) as progress:
        bar = progress.add_task("runs", total=len(settings) * seeds * len(configurations))
        for name, setting in settings.items():
            for seed in range(seeds):
                fleet: Fleet | None = None
                for configuration in configurations:
                    label = f"{name}, {configuration.label}, seed {seed}"
                    progress.update(bar, description=label)
                    path = _path(out, name, setting, configuration.label, seed)
                    if saved(path) is None:
                        fleet = fleet or Fleet(setting, seed)
                        run = run_to_end(fleet, name, configuration)
                        save(run, path)
                        sent = f"{run.bytes_up[-1] / 1e3:,.0f} kB up"
                        progress.print(f"{label}: {100 * run.final:.2f} %, {sent}")
                    progress.advance(bar)


def _path(out: Path, name: str, setting: Setting, label: str, seed: int) -> Path:
    return _folder(out, name, setting) / f"{label.replace(' ', '-')}-{seed}.json"


def _folder(out: Path, name: str, setting: Setting) -> Path:
    """Folder of runs with this number of rounds; runs of another length are kept apart."""
    return out / "runs" / f"{name}-{setting.rounds}"


def _all_runs(settings: dict[str, Setting], out: Path) -> dict[str, list[Run]]:
    found: dict[str, list[Run]] = {}
    for name, setting in settings.items():
        paths = sorted(_folder(out, name, setting).glob("*.json"))
        found[name] = [run for run in map(saved, paths) if run is not None]
    return found
