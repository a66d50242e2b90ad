"""The benchmark's cells: one run each, in the order in which they are run."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass
from itertools import product

RULES = ("none", "clip", "median", "trimmed-mean", "krum")
ATTACKS = ("random", "sign-flip", "scaled-step", "label-flip", "backdoor", "a-little")
CLEAN = "clean"
SETTINGS = ("iid", "alpha-0.5", "alpha-0.1")
HAR = "har"
SHARES = (0.1, 0.2, 0.4)
OF_PAPERS = ("fedspu", "srp-pfed", "kapc", "kapc-bls", "fedpurin", "dc-pfl")
WITH_MEAN = ("fedspu", "srp-pfed")  # the others can have no rule
BEST = ("median", "trimmed-mean")
ON_PAPERS = ("random", "scaled-step", "backdoor")


@dataclass(frozen=True, order=True)
class Cell:
    """One run.

    Attributes:
        method: name of the method.
        setting: how Fashion-MNIST is partitioned; `har`: UCI HAR by person.
        attack: what hostile devices do; `clean`: there are none.
        share: share of hostile devices.
        rule: `round.robust`.
        seed: of the run.
    """

    method: str
    setting: str
    attack: str
    share: float
    rule: str
    seed: int

    @property
    def name(self) -> str:
        """Its name in the results."""
        return "/".join(map(str, astuple(self)))


def cells(stage: str) -> Iterator[Cell]:
    """Yield the cells of one of `STAGES`."""
    yield from STAGES[stage]()


def _first() -> Iterator[Cell]:
    yield from _clean("iid", RULES, (0,))
    yield from _attacked(("iid",), (0.2,), (0,))


def _default() -> Iterator[Cell]:
    for setting in ("alpha-0.1", HAR):
        yield from _clean(setting, ("none", "clip"), range(5))


def _shares() -> Iterator[Cell]:
    yield from _attacked(("iid",), (0.1, 0.4), (0,))


def _settings() -> Iterator[Cell]:
    for setting in SETTINGS[1:]:
        yield from _clean(setting, RULES, (0,))
    yield from _attacked(SETTINGS[1:], SHARES, (0,))


def _seeds() -> Iterator[Cell]:
    for setting in SETTINGS:
        yield from _clean(setting, RULES, (1, 2))
    yield from _attacked(SETTINGS, SHARES, (1, 2))


def _papers() -> Iterator[Cell]:
    for seed, method, rule in product(range(3), OF_PAPERS, ("none", *BEST)):
        if rule != "none" and method not in WITH_MEAN:
            continue
        yield Cell(method, "alpha-0.5", CLEAN, 0.0, rule, seed)
        for attack in ON_PAPERS:
            yield Cell(method, "alpha-0.5", attack, 0.2, rule, seed)


def _clean(setting: str, rules: Sequence[str], seeds: Sequence[int]) -> Iterator[Cell]:
    for seed, rule in product(seeds, rules):
        yield Cell("fedavg", setting, CLEAN, 0.0, rule, seed)


def _attacked(settings: Sequence[str], shares: Sequence[float], seeds: Sequence[int]) -> Iterator[Cell]:
    for seed, setting, share, attack, rule in product(seeds, settings, shares, ATTACKS, RULES):
        yield Cell("fedavg", setting, attack, share, rule, seed)


STAGES: Mapping[str, Callable[[], Iterator[Cell]]] = {
    "first": _first,
    "default": _default,
    "shares": _shares,
    "settings": _settings,
    "seeds": _seeds,
    "papers": _papers,
}
