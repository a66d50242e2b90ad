"""The search of a sweep: Optuna chooses the next combinations from the results of earlier ones.

A batch has as many trials as can be executed in parallel. All randomness of a choice follows from the run's
seed and from the earlier trials. The study is stored in search.journal in the sweep's folder, so that the
same command continues the study: trials that were interrupted are finished first.
"""

from collections.abc import Sequence
from dataclasses import replace
from hashlib import blake2b
from importlib.util import find_spec
from itertools import islice
from typing import TYPE_CHECKING, Any

import msgspec

from fleetune.coordinator.metrics import readable
from fleetune.coordinator.metrics.metric import unit_of
from fleetune.coordinator.metrics.personal_scores import better_by
from fleetune.coordinator.metrics.registry import PERSONAL_MEAN, VALIDATION_MEAN
from fleetune.protocols.errors import FleetuneError, SettingError
from fleetune.protocols.settings.user_sources import user_sources
from fleetune.protocols.tasks import task_of
from fleetune.tools.compare.comparison import Comparison, Configuration, as_text
from fleetune.tools.compare.configurations import check_target, varied
from fleetune.tools.compare.engine import Execution, Experiment, Outcome, Report, run_experiment
from fleetune.tools.compare.sweep_axes import Axes, Axis, Range, combination

if TYPE_CHECKING:
    import optuna

JOURNAL = "search.journal"
MOST_TRIALS = 10_000
DIGITS = 4  # significant digits of a number from a range; more are hard to read
_BAD_BATCHES = 10  # consecutive batches without a successful run; the settings are then not the cause


def run_search(
    experiment: Experiment, axes: Axes, trials: int, execution: Execution, report: Report
) -> Comparison:
    """Execute trials until their total number is `trials`, then report all finished runs.

    Args:
        experiment: an experiment without configurations: the trials are its configurations.
        axes: settings with the values or ranges from which Optuna chooses.
        trials: number of trials, earlier ones included.
        execution: options of the execution; `fresh` replaces the study, too.
        report: see `run_experiment`.

    Raises:
        SettingError: the number of trials or a value is invalid, or Optuna is missing.
        FleetuneError: all runs failed, several times in a row.
        KeyboardInterrupt: interrupted.
    """
    _check(experiment, axes, trials)
    search = Search(experiment, axes, execution)
    ended: BaseException | None = None
    try:
        search.run(trials)
    except (KeyboardInterrupt, FleetuneError) as problem:
        ended = problem
    tried = replace(experiment, configurations=search.configurations())
    comparison = tried.results(tried.planned(execution))
    if comparison.runs:
        report(Outcome(comparison, search.failed, isinstance(ended, KeyboardInterrupt)))
    if ended is not None:
        raise ended
    return comparison


def _check(experiment: Experiment, axes: Axes, trials: int) -> None:
    """Raise the errors that can be found before any run is executed."""
    settings = experiment.settings
    if not 1 <= trials <= MOST_TRIALS:
        raise SettingError(f"--search {trials}: the number of trials must be between 1 and {MOST_TRIALS:,}")
    if find_spec("optuna") is None:
        raise SettingError("--search: Optuna is not installed here: pip install optuna")
    check_target(experiment.target, task_of(settings.task).score)
    first = {axis.key: axis.values[0] for axis in axes}
    for axis in axes:
        for value in axis.values:
            varied(settings, combination(settings, {**first, axis.key: value}))


class Search:
    """The trials of one search and their scores."""

    def __init__(self, experiment: Experiment, axes: Axes, execution: Execution) -> None:
        self._experiment, self._axes, self._execution = experiment, axes, execution
        self._settings = settings = experiment.settings
        validates = settings.data.validation_fraction and settings.run.final_evaluation
        self._metric = VALIDATION_MEAN if validates else PERSONAL_MEAN
        if execution.fresh:
            (execution.folder / JOURNAL).unlink(missing_ok=True)
        self._study = self._opened()
        self.failed: list[str] = []

    def configurations(self) -> list[Configuration]:
        """Return all tried configurations in order, each once."""
        return list({one.label: one for one in map(self._configuration, self._study.trials)}.values())

    def run(self, trials: int) -> None:
        """Continue until the total number of trials is `trials`.

        Raises:
            SettingError: a trial is not possible.
            FleetuneError: all runs failed, several times in a row.
            KeyboardInterrupt: interrupted.
        """
        at_once = max(1, self._execution.workers // len(self._experiment.seeds))
        bad_batches = 0
        while batch := self._next(min(at_once, trials - self._num_finished), trials):
            if self._execute(batch):
                bad_batches = 0
                self._report(trials)
                continue
            bad_batches += 1
            if bad_batches == _BAD_BATCHES:
                raise FleetuneError(f"all runs of the search failed; the last failure: {self.failed[-1]}")

    def _report(self, trials: int) -> None:
        import optuna

        done = self._study.get_trials(deepcopy=False, states=(optuna.trial.TrialState.COMPLETE,))
        if done:
            best = self._study.best_trial
            score = unit_of(task_of(self._settings.task).score).text(best.value)
            label = readable.printable(self._configuration(best).label)
            samples = "validation" if self._metric == VALIDATION_MEAN else "test"
            self._execution.console.print(
                f"{self._num_finished} of {trials} trials; best on {samples} samples: {score} with {label}",
                soft_wrap=True,
            )

    @property
    def _num_finished(self) -> int:
        return sum(trial.state.is_finished() for trial in self._study.trials)

    def _next(self, at_once: int, trials: int) -> list["optuna.trial.FrozenTrial"]:
        """Return the trials to execute now: interrupted ones, else new ones."""
        in_progress = (trial for trial in self._study.trials if not trial.state.is_finished())
        if batch := list(islice(in_progress, max(at_once, 0))):
            return batch
        new = max(0, min(at_once, trials - len(self._study.trials)))
        for _ in range(new):
            self._choose()
        return self._study.trials[len(self._study.trials) - new :]

    def _choose(self) -> None:
        import optuna

        key = f"{self._settings.run.seed} {len(self._study.trials)}"
        seed = int.from_bytes(blake2b(key.encode(), digest_size=4).digest())
        self._study.sampler = optuna.samplers.TPESampler(seed=seed)
        trial = self._study.ask()
        for axis in self._axes:
            _suggest(trial, axis)

    def _execute(self, batch: Sequence["optuna.trial.FrozenTrial"]) -> bool:
        """Execute trials and report their scores to the study; True if any run finished."""
        import optuna

        chosen = {trial.number: self._configuration(trial) for trial in batch}
        unique = list({one.label: one for one in chosen.values()}.values())
        experiment = replace(self._experiment, configurations=unique, target=None)
        outcomes: list[Outcome] = []
        try:
            run_experiment(experiment, self._execution, outcomes.append)
        except SettingError:
            for trial in batch:
                self._study.tell(trial.number, state=optuna.trial.TrialState.FAIL)
            raise
        except FleetuneError as problem:
            self.failed.extend(outcomes[0].failed if outcomes else [str(problem)])
        comparison = outcomes[0].comparison if outcomes else None
        for trial in batch:
            label = chosen[trial.number].label
            found = comparison.spread(label, self._metric) if comparison else None
            if found is None or found.count < len(self._experiment.seeds):
                self._study.tell(trial.number, state=optuna.trial.TrialState.FAIL)
            else:
                self._study.tell(trial.number, found.mean)
        return bool(outcomes)

    def _configuration(self, trial: "optuna.trial.FrozenTrial") -> Configuration:
        return combination(self._settings, {axis.key: _value(axis, trial.params) for axis in self._axes})

    def _opened(self) -> "optuna.Study":
        """Return the study of these settings, ranges and seeds; other settings have their own study."""
        import optuna
        from optuna.storages import JournalStorage
        from optuna.storages.journal import JournalFileBackend

        optuna.logging.set_verbosity(optuna.logging.WARNING)
        folder = self._execution.folder
        folder.mkdir(parents=True, exist_ok=True)
        of: tuple[Any, ...] = (
            msgspec.structs.replace(self._settings, compare={}),
            [_words(axis) for axis in self._axes],
            list(self._experiment.seeds),
        )
        if sources := user_sources([self._settings, [axis.values for axis in self._axes]]):
            of = (*of, sources)
        of = (*of, self._metric.name)
        sign = better_by(task_of(self._settings.task).score)
        return optuna.create_study(
            study_name=blake2b(msgspec.json.encode(of), digest_size=8).hexdigest(),
            storage=JournalStorage(JournalFileBackend(str(folder / JOURNAL))),
            direction="maximize" if sign > 0 else "minimize",
            load_if_exists=True,
        )


def _suggest(trial: "optuna.Trial", axis: Axis | Range) -> None:
    if isinstance(axis, Axis):
        trial.suggest_categorical(axis.key, [as_text(one) for one in axis.values])
    elif axis.is_whole:
        trial.suggest_int(axis.key, int(axis.low), int(axis.high), log=axis.log)
    else:
        trial.suggest_float(axis.key, axis.low, axis.high, log=axis.log)


def _value(axis: Axis | Range, params: dict[str, Any]) -> Any:
    """Return the value of a setting in a trial; the first possible value if the choice was interrupted."""
    if axis.key not in params:
        return axis.values[0]
    chosen = params[axis.key]
    if isinstance(axis, Axis):
        return next(one for one in axis.values if as_text(one) == chosen)
    if axis.is_whole:
        return int(chosen)
    return min(max(float(f"{chosen:.{DIGITS}g}"), axis.low), axis.high)


def _words(axis: Axis | Range) -> str:
    values = ",".join(map(as_text, axis.values)) if isinstance(axis, Axis) else axis.words
    return f"{axis.key}={values}"
