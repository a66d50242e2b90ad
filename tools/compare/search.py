"""edge-sim sweep --search: Optuna chooses which settings to play next, by what those before came to.

Trials are asked for as many at a time as are played at once, and all that is random in a choice follows from
the run's seed and from the trials before. The study lies in search.journal in the sweep's folder, so the same
command goes on: a trial that was under way is played to its end first.
"""

from collections.abc import Sequence
from hashlib import blake2b
from importlib.util import find_spec
from itertools import islice
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec.structs import replace as replaced

from fleetune.coordinator.metrics import readable
from fleetune.coordinator.metrics.metric import unit_of
from fleetune.coordinator.metrics.personal_scores import better_by
from fleetune.coordinator.metrics.registry import PERSONAL_MEAN, VALIDATION_MEAN
from fleetune.protocols.errors import FleetuneError, SettingError
from fleetune.protocols.settings.run_settings import RunSettings
from fleetune.protocols.settings.user_sources import user_sources
from fleetune.protocols.tasks import task_of
from fleetune.tools.compare.axes import Axis, Range, combination
from fleetune.tools.compare.comparison import Contender
from fleetune.tools.compare.contenders import varied
from fleetune.tools.compare.side_by_side import Outcome, Question, Work, side_by_side
from fleetune.tools.compare.sweep_tables import in_words

if TYPE_CHECKING:
    import optuna

JOURNAL = "search.journal"
MOST_TRIALS = 10_000
DIGITS = 4  # of a number between two others: nobody reads more
_BAD_BATCHES = 10  # on end in which nothing could be played: something else is wrong than the settings


def check_search(settings: RunSettings, axes: Sequence[Axis | Range], trials: int) -> None:
    """What can be known before anything is played.

    Raises:
        SettingError: Optuna is not installed, an end of a range or a choice is none that there can be.
    """
    if not 1 <= trials <= MOST_TRIALS:
        raise SettingError(f"--search {trials}: between 1 and {MOST_TRIALS:,} trials")
    if find_spec("optuna") is None:
        raise SettingError("--search: Optuna is not installed here: pip install optuna")
    first = {axis.key: _ends(axis)[0] for axis in axes}
    for axis in axes:
        for value in _ends(axis):
            varied(settings, combination(settings, {**first, axis.key: value}))


class Search:
    """The trials of one search, and what they came to.

    Args:
        settings: of the run file.
        axes: what is chosen from.
        seeds: that every trial is played with.
        work: how; what `fresh` replaces is the study, too.
    """

    def __init__(
        self, settings: RunSettings, axes: Sequence[Axis | Range], seeds: Sequence[int], work: Work
    ) -> None:
        self._settings, self._axes, self._seeds, self._work = settings, axes, seeds, work
        validates = settings.data.validation_fraction and settings.run.final_evaluation
        self._metric = VALIDATION_MEAN if validates else PERSONAL_MEAN
        self._sign = better_by(task_of(settings.task).score)
        if work.fresh:
            (work.folder / JOURNAL).unlink(missing_ok=True)
        self._study = self._opened()
        self.failed: list[str] = []

    def contenders(self) -> list[Contender]:
        """All that were tried, in order; what was chosen twice stands there once."""
        return list({one.label: one for one in map(self._contender, self._study.trials)}.values())

    def run(self, trials: int) -> None:
        """Go on until there are so many trials in all.

        Raises:
            SettingError: a trial is none that there can be; FleetuneError: nothing can be played.
            KeyboardInterrupt: interrupted.
        """
        at_once = max(1, self._work.workers // len(self._seeds))
        bad_batches = 0
        while batch := self._next(min(at_once, trials - self._told()), trials):
            if self._play(batch):
                bad_batches = 0
                self._say(trials)
                continue
            bad_batches += 1
            if bad_batches == _BAD_BATCHES:
                raise FleetuneError(f"nothing could be played; the last: {self.failed[-1]}")

    def _say(self, trials: int) -> None:
        import optuna

        done = self._study.get_trials(deepcopy=False, states=(optuna.trial.TrialState.COMPLETE,))
        if done:
            best = self._study.best_trial
            score = unit_of(task_of(self._settings.task).score).text(best.value)
            told = readable.printable(self._contender(best).label)
            self._work.console.print(
                f"{self._told()} of {trials} trials; best on {self._samples} samples: {score} with {told}",
                soft_wrap=True,
            )

    @property
    def _samples(self) -> str:
        return "validation" if self._metric == VALIDATION_MEAN else "test"

    def _told(self) -> int:
        return sum(trial.state.is_finished() for trial in self._study.trials)

    def _next(self, at_once: int, trials: int) -> list["optuna.trial.FrozenTrial"]:
        """Trials to be played now: those that were under way, else new ones."""
        under_way = (trial for trial in self._study.trials if not trial.state.is_finished())
        if batch := list(islice(under_way, max(at_once, 0))):
            return batch
        asked = min(at_once, trials - len(self._study.trials))
        for _ in range(asked):
            self._ask()
        return self._study.trials[len(self._study.trials) - asked :] if asked > 0 else []

    def _ask(self) -> None:
        import optuna

        key = f"{self._settings.run.seed} {len(self._study.trials)}"
        seed = int.from_bytes(blake2b(key.encode(), digest_size=4).digest())
        self._study.sampler = optuna.samplers.TPESampler(seed=seed)
        trial = self._study.ask()
        for axis in self._axes:
            _suggest(trial, axis)

    def _play(self, batch: Sequence["optuna.trial.FrozenTrial"]) -> bool:
        """Play trials and tell what they came to; whether any could be played."""
        import optuna

        contenders = {trial.number: self._contender(trial) for trial in batch}
        unique = list({one.label: one for one in contenders.values()}.values())
        question = Question(self._settings, unique, self._seeds, None, "combination")
        outcomes: list[Outcome] = []
        try:
            side_by_side(question, self._work, outcomes.append)
        except SettingError:
            for trial in batch:
                self._study.tell(trial.number, state=optuna.trial.TrialState.FAIL)
            raise
        except FleetuneError as problem:
            self.failed.extend(outcomes[0].failed if outcomes else [str(problem)])
        comparison = outcomes[0].comparison if outcomes else None
        for trial in batch:
            label = contenders[trial.number].label
            found = comparison.spread(label, self._metric) if comparison else None
            if found is None or found.count < len(self._seeds):
                self._study.tell(trial.number, state=optuna.trial.TrialState.FAIL)
            else:
                self._study.tell(trial.number, found.mean)
        return bool(outcomes)

    def _contender(self, trial: "optuna.trial.FrozenTrial") -> Contender:
        return combination(self._settings, {axis.key: _value(axis, trial.params) for axis in self._axes})

    def _opened(self) -> "optuna.Study":
        """The study of these settings, ranges and seeds: with others a trial comes to something else."""
        import optuna
        from optuna.storages import JournalStorage
        from optuna.storages.journal import JournalFileBackend

        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self._work.folder.mkdir(parents=True, exist_ok=True)
        asked: tuple[Any, ...] = (
            replaced(self._settings, compare={}),
            [_words(axis) for axis in self._axes],
            list(self._seeds),
        )
        if sources := user_sources([self._settings, [_ends(axis) for axis in self._axes]]):
            asked = (*asked, sources)
        asked = (*asked, self._metric.name)
        name = blake2b(msgspec.json.encode(asked), digest_size=8).hexdigest()
        return optuna.create_study(
            study_name=name,
            storage=JournalStorage(JournalFileBackend(str(self._work.folder / JOURNAL))),
            direction="maximize" if self._sign > 0 else "minimize",
            load_if_exists=True,
        )


def _suggest(trial: "optuna.Trial", axis: Axis | Range) -> None:
    if isinstance(axis, Axis):
        trial.suggest_categorical(axis.key, [in_words(one) for one in axis.values])
    elif _is_whole(axis):
        trial.suggest_int(axis.key, int(axis.low), int(axis.high), log=axis.log)
    else:
        trial.suggest_float(axis.key, axis.low, axis.high, log=axis.log)


def _value(axis: Axis | Range, params: dict[str, Any]) -> Any:
    """What a trial has for a setting; where it was stopped while it was chosen, the first there is."""
    if axis.key not in params:
        return _ends(axis)[0]
    chosen = params[axis.key]
    if isinstance(axis, Axis):
        return next(one for one in axis.values if in_words(one) == chosen)
    if _is_whole(axis):
        return int(chosen)
    return min(max(float(f"{chosen:.{DIGITS}g}"), axis.low), axis.high)


def _is_whole(axis: Range) -> bool:
    return isinstance(axis.low, int) and isinstance(axis.high, int)


def _ends(axis: Axis | Range) -> Sequence[Any]:
    return axis.values if isinstance(axis, Axis) else (axis.low, axis.high)


def _words(axis: Axis | Range) -> str:
    values = ",".join(map(in_words, axis.values)) if isinstance(axis, Axis) else axis.words
    return f"{axis.key}={values}"
