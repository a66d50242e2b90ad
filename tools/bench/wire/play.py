"""The runs of `edge-sim bench wire`: those that are not there yet are played, all go into the tables."""

import json
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path

from rich.console import Console
from rich.progress import Progress

from fleetune.protocols.errors import SettingError
from fleetune.protocols.files import write_atomically
from fleetune.tools.bench.own_environment import NotInstalled
from fleetune.tools.bench.trained_differences import Fleet as PatchFleet
from fleetune.tools.bench.trained_differences import updates_of
from fleetune.tools.bench.wire import rate_distortion
from fleetune.tools.bench.wire.contenders import SENDERS
from fleetune.tools.bench.wire.fleet import SETTINGS, Fleet, Setting
from fleetune.tools.bench.wire.race import OWN_TRAINING, Contender, Run, kept, race, recalled
from fleetune.tools.bench.wire.report import written

NO_SETTING = "none"
STEPS_OF_CNN = PatchFleet(model="cnn-kapc", devices=2, samples=500, rounds=4)


@dataclass(frozen=True)
class Wanted:
    """What the command line asks for, see `command.wire`."""

    out: Path
    settings: str
    seeds: int
    only: str
    rate: float
    momentum: float
    rounds: int | None
    data: str | None
    steps: bool


def play(wanted: Wanted, console: Console) -> None:
    """Play what is missing, and write down what came of all.

    Raises:
        SettingError: there is no such setting or contender.
    """
    chosen = _settings(wanted.settings, wanted.rounds, wanted.data)
    contenders = [_contender(name, wanted) for name in _names(wanted.only)]
    if Contender("dense") not in contenders:
        contenders.insert(0, Contender("dense"))
    if wanted.steps:
        _weighed(wanted.out, console)
    if not chosen:
        return
    _played(chosen, contenders, wanted.seeds, wanted.out, console)
    console.print(written(_all_runs(chosen, wanted.out), wanted.out), markup=False, soft_wrap=True)


def _weighed(out: Path, console: Console) -> None:
    """Leave steps.md and steps.json: of a device, the first round's step (hot) and the last one's (calm)."""
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
            raise SettingError(f"--settings: no {name!r}; there are {', '.join([*SETTINGS, NO_SETTING])}")
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
            raise SettingError(f"--only: no {pattern!r}; there are {', '.join(known)}")
    return [name for name in known if any(fnmatchcase(name, pattern) for pattern in patterns)]


def _contender(name: str, wanted: Wanted) -> Contender:
    """A coordinator that averages no steps has no damping."""
    return Contender(name) if name in OWN_TRAINING else Contender(name, wanted.rate, wanted.momentum)


def _played(
    settings: dict[str, Setting], contenders: list[Contender], seeds: int, out: Path, console: Console
) -> None:
    with Progress(console=console) as progress:
        bar = progress.add_task("runs", total=len(settings) * seeds * len(contenders))
        for name, setting in settings.items():
            for seed in range(seeds):
                fleet: Fleet | None = None
                for contender in contenders:
                    label = f"{name}, {contender.label}, seed {seed}"
                    progress.update(bar, description=label)
                    path = _path(out, name, setting, contender.label, seed)
                    if recalled(path) is None:
                        fleet = fleet or Fleet(setting, seed)
                        run = race(fleet, name, contender)
                        kept(run, path)
                        sent = f"{run.bytes_up[-1] / 1e3:,.0f} kB up"
                        progress.print(f"{label}: {100 * run.final:.2f} %, {sent}")
                    progress.advance(bar)


def _path(out: Path, name: str, setting: Setting, label: str, seed: int) -> Path:
    return _folder(out, name, setting) / f"{label.replace(' ', '-')}-{seed}.json"


def _folder(out: Path, name: str, setting: Setting) -> Path:
    """Runs of another length are not compared with these."""
    return out / "runs" / f"{name}-{setting.rounds}"


def _all_runs(settings: dict[str, Setting], out: Path) -> dict[str, list[Run]]:
    found: dict[str, list[Run]] = {}
    for name, setting in settings.items():
        paths = sorted(_folder(out, name, setting).glob("*.json"))
        found[name] = [run for run in map(recalled, paths) if run is not None]
    return found
