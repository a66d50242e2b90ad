"""The benchmark's configurations: candidates for choosing ratios, for each method, in each fleet.

A candidate is `RATIO` or `OBJECTIVE`, then `*TIMES` if it has more rounds, then `+PREFERENCE` if clients are
selected by a preference:

    0.4         all devices at p = 0.4
    fedavg      FedAvg with the devices that can afford whole models
    time        as the coordinator proposes for `objective.minimise = "time"`; bytes, energy likewise
    time*3      the same with up to three times the rounds, until the best fixed candidate's last round ends
    0.4+oort    all devices at p = 0.4, `round.prefer = "oort"`

A candidate with shorter rounds finishes its rounds in a part of the time; `*` gives it the rest of the time.
Ratios and FedAvg are the fixed candidates: the baselines of the others.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fleetune.protocols.errors import SettingError
from fleetune.protocols.methods import REGISTRY, with_defaults_of_run
from fleetune.protocols.settings.run_settings import RunSettings
from fleetune.tools.compare.comparison import Configuration

OBJECTIVES = ("time", "bytes", "energy")
FEDAVG = "fedavg"
MOST_LONGER = 20
_LONGER = {str(times): times for times in range(2, MOST_LONGER + 1)}  # factors by their text
OWN_FLEET = "own"
FLEETS: dict[str, dict[str, dict[str, int]]] = {
    OWN_FLEET: {},
    "thin-links": {
        "boards": {"n100-gateway": 1, "raspberry-pi-5": 1},
        "links": {"lora-backhaul": 1, "rural-dsl": 1},
    },
    "slow-boards": {"boards": {"raspberry-pi-zero-2w": 3, "raspberry-pi-3b-plus": 2}, "links": {"lan": 1}},
    "batteries": {"boards": {"phone-low": 1, "phone-mid": 1}, "links": {"4g": 1, "factory-wifi": 1}},
}
"""Further fleets, by shares of devices: fast boards on thin links, slow boards on fast links, phones with
batteries that run empty.
"""
CHARGE = (0.0001, 0.0004)  # charge of `batteries`, unless the run file sets it


@dataclass(frozen=True)
class Candidate:
    """A candidate for choosing ratios.

    Attributes:
        words: its name in `--candidates`.
        ratio: ratio of all devices; None: the coordinator proposes ratios.
        objective: value of `minimise`; None: all devices have `ratio`.
        prefer: value of `round.prefer`; None: that of the run file.
        longer: factor on the run file's number of rounds; above 1 it ends with the best fixed candidate.
    """

    words: str
    ratio: float | None = None
    objective: str | None = None
    prefer: str | None = None
    longer: int = 1

    @property
    def is_fixed(self) -> bool:
        """True if it is a baseline of the others."""
        return self.objective is None and self.prefer is None and self.longer == 1

    def changes(self, settings: RunSettings) -> dict[str, Any]:
        """The changes to the run file's settings."""
        found: dict[str, Any] = {"fleet.ratios": [] if self.ratio is None else [self.ratio]}
        found["objective.minimise"] = self.objective or "none"
        if self.prefer:
            found["round.prefer"] = self.prefer
        if self.longer > 1 and settings.run.last_round is not None:
            found["run.rounds"] = self.longer * settings.run.last_round
        return found


@dataclass(frozen=True, eq=False)
class Group:
    """One method in one fleet, and the label of each candidate's runs."""

    fleet: str
    method: str
    labels: dict[str, str]


def candidates_of(words: str) -> list[Candidate]:
    """The candidates of the option. Raises SettingError: one is unknown, or all or none are fixed."""
    found = [_candidate(one.strip()) for one in words.split(",")]
    if all(one.is_fixed for one in found) or not any(one.is_fixed for one in found):
        raise SettingError(
            f"--candidates {words}: name some ratios, and what to compare with them, e.g. 0.2,0.4,time,energy"
        )
    return found


def _candidate(words: str) -> Candidate:
    rest, _, prefer = words.partition("+")
    what, star, times = rest.partition("*")
    if star and times not in _LONGER:
        raise SettingError(
            f"--candidates {words}: behind * goes how many times the rounds, 2 to {MOST_LONGER}"
        )
    longer, found = _LONGER.get(times, 1), prefer or None
    if what in OBJECTIVES:
        return Candidate(words, objective=what, prefer=found, longer=longer)
    ratio = 1.0 if what == FEDAVG else _ratio(what)
    if not 0 < ratio <= 1:
        known = ", ".join((*OBJECTIVES, FEDAVG))
        raise SettingError(f"--candidates {words}: neither a ratio in (0, 1] nor one of {known}")
    return Candidate(words, ratio=ratio, prefer=found, longer=longer)


def _ratio(words: str) -> float:
    try:
        return float(words)
    except ValueError:
        return 0.0


def groups_of(
    settings: RunSettings, fleets: Sequence[str], methods: Sequence[str], candidates: Sequence[Candidate]
) -> tuple[list[Group], list[Configuration]]:
    """Every method in every fleet with every candidate. All methods of a fleet share its runs of FedAvg.

    Raises:
        SettingError: a fleet or a method is unknown.
    """
    for given, known, option in ((fleets, FLEETS, "fleets"), (methods, REGISTRY, "methods")):
        for one in given:
            if one not in known:
                raise SettingError(f"--{option} {one}: unknown; known: {', '.join(known)}")
    groups, configurations = [], dict[str, Configuration]()
    for fleet in fleets:
        for method in methods:
            labels = {candidate.words: _label(fleet, method, candidate) for candidate in candidates}
            within = _baselines(candidates, labels)
            for candidate in candidates:
                label, changes = (
                    labels[candidate.words],
                    {**_of_fleet(settings, fleet), **candidate.changes(settings)},
                )
                own = _method(settings, FEDAVG if _is_fedavg(candidate) else method, candidate)
                configurations[label] = Configuration(
                    label, own, changes, within if candidate.longer > 1 else ()
                )
            groups.append(Group(fleet, method, labels))
    return groups, list(configurations.values())


def _is_fedavg(candidate: Candidate) -> bool:
    return candidate.words.startswith(FEDAVG)


def _label(fleet: str, method: str, candidate: Candidate) -> str:
    return f"{fleet}, {candidate.words}" if _is_fedavg(candidate) else f"{fleet}, {method}, {candidate.words}"


def _method(settings: RunSettings, name: str, candidate: Candidate) -> Mapping[str, Any]:
    """A method's [method] section; with more rounds its defaults still follow the run file's number of
    rounds.
    """
    section = settings.method if name == settings.method["name"] else {"name": name}
    rounds = settings.run.last_round
    return section if candidate.longer == 1 or rounds is None else with_defaults_of_run(section, rounds)


def _baselines(candidates: Sequence[Candidate], labels: Mapping[str, str]) -> tuple[str, ...]:
    """The labels of the fixed ratios, or of FedAvg if there are none."""
    fixed = [candidate for candidate in candidates if candidate.is_fixed]
    ratios = [candidate for candidate in fixed if not _is_fedavg(candidate)]
    return tuple(labels[candidate.words] for candidate in ratios or fixed)


def _of_fleet(settings: RunSettings, fleet: str) -> dict[str, Any]:
    shares = FLEETS[fleet]
    changes: dict[str, Any] = {
        f"fleet.{key}": _shared(settings.fleet.devices, of) for key, of in shares.items()
    }
    if fleet == "batteries" and settings.fleet.batteries is None:
        changes["fleet.batteries"] = list(CHARGE)
    return changes


def _shared(devices: int, shares: dict[str, int]) -> dict[str, int]:
    """The number of devices of each kind, in proportion to `shares`; the numbers add up to `devices`."""
    total, counts, given, before = sum(shares.values()), {}, 0, 0
    for name, share in shares.items():
        given += share
        upto = round(devices * given / total)
        counts[name], before = upto - before, upto
    return {name: number for name, number in counts.items() if number}
