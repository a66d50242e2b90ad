"""The local training loop: the run's optimiser on the flat vector, with any backend."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fleetune.edge_agent.training.augmentation import augmentation_of
from fleetune.edge_agent.training.backend import Backend, ExtraLoss, InputArray, LabelArray
from fleetune.edge_agent.training.descent import Descent
from fleetune.edge_agent.training.device_data import DeviceData
from fleetune.edge_agent.training.optimisers.optimiser_states import RoundOptimiserStates
from fleetune.edge_agent.training.smaller_network import sub_model_of
from fleetune.protocols.errors import TrainingDiverged, TrainingStopped
from fleetune.protocols.finite import all_finite
from fleetune.protocols.method.trainer import Fit, FitPlan, Part, Rows, num_local_steps
from fleetune.protocols.model.compute_cost import trained_tensors
from fleetune.protocols.model.loss_terms import LossTerm
from fleetune.protocols.model.spec import FlatArray, ModelSpec
from fleetune.protocols.randomness import Key
from fleetune.protocols.settings import rate_schedule
from fleetune.protocols.settings.device import TrainingSection
from fleetune.protocols.tasks.anomaly_threshold import ROUNDING, Threshold, false_alarms_of, num_needed
from fleetune.protocols.tasks.reconstruction import Reconstruction
from fleetune.protocols.tasks.score_gain import Gain, score_gain
from fleetune.protocols.tasks.task import Task

# samples per evaluation: larger batches are no faster in ONNX Runtime and would set the peak of memory
_EVALUATION_BATCH = 32


def never() -> bool:
    """Never end local training early."""
    return False


def batch_slices(num_samples: int, batch_size: int) -> list[slice]:
    """Return the batches of an epoch as slices of its samples.

    The last batch may be smaller. If it would have a single sample, the batch before it takes that sample,
    for every model: batch normalisation cannot process one sample, and its gradient is the noisiest.
    """
    starts = list(range(0, num_samples, batch_size))
    if len(starts) > 1 and batch_size > 1 and num_samples - starts[-1] == 1:
        starts.pop()
    return [slice(start, stop) for start, stop in pairwise([*starts, num_samples])]


def trains_on_single_samples(spec: ModelSpec, num_samples: int, batch_size: int) -> bool:
    """True if a device trains a model with batch norms on batches of one sample.

    Batch norms with one value a channel then use their running statistics.
    """
    has_norms = any(tensor.kind == "stat" for tensor in spec.tensors)
    return has_norms and (num_samples == 1 or (num_samples > 1 and batch_size == 1))


def single_sample_line(devices: str, batch_size: int) -> str:
    """Return a line for the user about devices that train on single samples, and the consequence."""
    why = "training.batch_size = 1" if batch_size == 1 else devices
    return f"{why}: batch norms with one value a channel then use their running statistics"


@dataclass(frozen=True)
class LocalTrainer:
    """A `protocols.method.trainer.Trainer` with a backend and a device's data.

    Attributes:
        backend: computes losses and gradients. Its vectors may change between calls.
        data: samples in the model's shape, see `edge_agent.training.device_data.check_fits`.
        settings: the run's [training] section with the learning rate of the current round.
        optimiser_states: the optimiser's state from round to round. None: each `fit` starts without one.
        local_work: factor on the run's number of steps in `fit` and `batches`. Epochs set by a plan are not
            scaled.
        enough: called after every step of `fit`, unless the plan keeps the last gradient; True ends training
            early.
        stop: called before every batch of `fit`; returning a reason ends training with TrainingStopped.
        progress: called after every batch with the finished fraction of `fit`, up to 1.
    """

    backend: Backend
    data: DeviceData
    settings: TrainingSection
    stop: Callable[[], str | None] = field(default=lambda: None, repr=False)
    progress: Callable[[float], None] = field(default=lambda _: None, repr=False)
    optimiser_states: RoundOptimiserStates | None = field(default=None, repr=False)
    local_work: float = 1.0
    enough: Callable[[], bool] = field(default=never, repr=False)

    def in_round(
        self,
        number: int,
        optimiser_states: RoundOptimiserStates | None,
        *,
        local_work: float = 1.0,
        enough: Callable[[], bool] = never,
    ) -> "LocalTrainer":
        """Return the trainer for one round. Rounds count from 1."""
        return replace(
            self,
            settings=rate_schedule.in_round(self.settings, number),
            optimiser_states=optimiser_states,
            local_work=local_work,
            enough=enough,
        )

    @property
    def spec(self) -> ModelSpec:
        return self.backend.spec

    @property
    def task(self) -> Task:
        """The run's task."""
        return self.backend.task

    @property
    def num_samples(self) -> int:
        """Number of training samples, without validation and test."""
        return self.data.size("train")

    @property
    def num_classes_held(self) -> int:
        """Number of the model's classes among the training samples; 1 if the task has no classes."""
        labels = self.data.part("train")[1]
        return np.unique(labels).size if labels.ndim == 1 else 1

    @property
    def num_test(self) -> int:
        """Number of test samples."""
        return self.data.size("test")

    def on_all(self) -> "LocalTrainer":
        """Return a trainer that also trains on the validation samples."""
        return replace(self, data=self.data.without_validation())

    def fit(self, weights: FlatArray, plan: FitPlan, key: Key) -> Fit:
        """Train from `weights` with the run's optimiser, on the clipped gradient of loss, loss term and pull.

        The optimiser starts without a state, or with that of `optimiser_states`. Epoch e takes the samples in
        the order `key.child("epoch", e).permutation(n)`, divided by `batch_slices`. Step s augments its batch
        with `key.child("augment", s)`. The returned loss and `last_gradient` are those of the data alone,
        without pull and weight decay; the gradient covers frozen entries too. The models of a loss term
        answer to samples without augmentation. If the plan guarantees zeros outside some neurons and the
        backend supports it, a smaller network is trained instead.

        Raises:
            TrainingStopped: `stop` returned a reason.
            TrainingDiverged: loss, gradient or weights became NaN or infinite.
            SettingError: the run's augmentation failed.
            ModelError: the backend cannot compute the loss term.
        """
        if part := sub_model_of(self.backend, weights, plan):
            alone = replace(
                self, backend=part.network.backend, optimiser_states=part.states(self.optimiser_states)
            )
            return part.put_back(alone.fit(part.taken(weights), part.plan(plan), key), weights)
        answers = self._answers(plan.loss_term)
        self.backend.load(weights)
        with np.errstate(over="ignore", invalid="ignore"):  # divergence is detected and reported below
            return self._descend(plan, answers, key)

    def _answers(self, loss_term: LossTerm | None) -> list[NDArray[np.float32]]:
        """Return answers of each model of the loss term on all training samples; run once, as the models are
        fixed.
        """
        answers: list[NDArray[np.float32]] = []
        if loss_term is None or not self.num_samples:
            return answers
        for weights in loss_term.models:
            self.backend.look_at(weights)
            parts = [self.backend.answer(x, loss_term.answer) for x, _ in self._parts("train")]
            answers.append(np.concatenate(parts))
        return answers

    def _descend(self, plan: FitPlan, answers: list[NDArray[np.float32]], key: Key) -> Fit:
        weights, gradient = self.backend.weights, self.backend.gradient
        states, augment = self.optimiser_states, augmentation_of(self.settings.augmentations, self.spec)
        before = None if states is None else states.next()
        descent = self.backend.gpu_descent(self.settings, plan, before) or Descent(
            weights, gradient, self.spec.num_parameters, self.settings, plan, before
        )
        epochs, share = (self.settings.epochs, self.local_work) if plan.epochs is None else (plan.epochs, 1.0)
        batches = batch_slices(self.num_samples, self.settings.batch_size)
        all_steps = epochs * len(batches)
        num_steps, epochs = num_local_steps(all_steps, share), math.ceil(epochs * max(1.0, share))
        step, loss, last_gradient = 0, 0.0, None
        trained, upper = self._trained(plan)
        for epoch in range(epochs if batches else 0):
            order, total, seen = key.child("epoch", epoch).permutation(self.num_samples), 0.0, 0
            for batch in batches[: num_steps - step]:
                if reason := self.stop():
                    raise TrainingStopped(f"training stopped after {step} of {num_steps} steps: {reason}")
                rows = order[batch]
                extra_loss = (
                    ExtraLoss(plan.loss_term, tuple(every[rows] for every in answers))
                    if plan.loss_term
                    else None
                )
                x, y = augment(*self.data.batch("train", rows), key.child("augment", step))
                y = self.task.targets(x, y)
                whole = plan.keep_last_gradient and step + 1 == num_steps
                move_lower = plan.lower is None or plan.lower.train_in(step, key)
                wanted = trained if move_lower else upper
                mean = self.backend.step(
                    x, y, key.child("step", step), extra_loss=extra_loss, tensors=None if whole else wanted
                )
                self._check_finite(
                    math.isfinite(mean), f"the loss is {mean:g} in step {step + 1} of {num_steps}"
                )
                total += mean * rows.size
                seen += rows.size
                step += 1
                if whole:
                    last_gradient = self.backend.gradient.copy()
                norm = descent.step(move_lower=move_lower)
                if norm is not None:
                    what = f"the gradient's norm is {norm:g} in step {step} of {num_steps}"
                    self._check_finite(math.isfinite(norm), what)
                self.progress(step / num_steps)
                if step < num_steps and not plan.keep_last_gradient and self.enough():
                    num_steps = step
                    break
            loss = total / seen if seen else loss
        finite = all_finite(self.backend.weights)
        self._check_finite(finite, f"weights are not finite after {num_steps} steps")
        if states is not None:
            state = descent.state()
            finite = all(map(all_finite, state.vectors))
            self._check_finite(finite, f"the optimiser's state is not finite after {num_steps} steps")
            states.put(state)
        done = num_steps / all_steps if all_steps and plan.epochs is None else None
        return Fit(self.backend.take(), loss, num_steps, last_gradient, done)

    def _trained(self, plan: FitPlan) -> tuple[frozenset[str] | None, frozenset[str] | None]:
        """Return the names of all trained tensors (None for all), and of those without entries in lower
        layers.
        """
        every = None if plan.trainable is None else trained_tensors(plan.trainable, self.spec)
        if plan.lower is None:
            return every, every
        upper = np.arange(self.spec.size) >= plan.lower.stop
        if plan.trainable is not None:
            upper &= plan.trainable
        return every, trained_tensors(upper, self.spec)

    def _check_finite(self, finite: bool, what: str) -> None:
        if not finite:
            rate = self.settings.learning_rate
            raise TrainingDiverged(f"training diverged ({what}): lower training.learning_rate (now {rate:g})")

    def loss(self, weights: FlatArray, part: Part = "train", rows: Rows | None = None) -> float:
        """Return the mean loss in evaluation mode over a part, or over its samples `rows`; 0 if there are
        none.

        Validation samples that are never trained on do not count.
        """
        self.backend.look_at(weights)
        chosen = self._with_loss(part) if rows is None else rows
        total = sum(self.backend.evaluate(x, y)[0] for x, y in self._parts(part, chosen))
        return total / max(1, chosen.size)

    def losses(self, weights: FlatArray, part: Part = "train") -> NDArray[np.float64]:
        """Return the loss of each sample of a part in evaluation mode, shape (n,).

        Validation samples that are never trained on are left out.
        """
        self.backend.look_at(weights)
        found = [self.backend.losses(x, y) for x, y in self._parts(part, self._with_loss(part))]
        return np.concatenate([np.zeros(0), *found])

    def _with_loss(self, part: Part) -> Rows:
        return self.data.compared if part == "validation" else np.arange(self.data.size(part))

    def accuracy(self, weights: FlatArray, part: Part = "test") -> float | None:
        """Return the fraction of correct predictions in evaluation mode, 0..1.

        The result is None if there is no accuracy.
        """
        has = any(one.name == "accuracy" for one in self.task.scores)
        return self._figure(weights, part, "accuracy") if has else None

    def score(self, weights: FlatArray, part: Part = "test") -> float | None:
        """Return the task's score in evaluation mode; None if the part is empty or has too few kinds of
        samples.
        """
        return self._figure(weights, part, self.task.score.name)

    @property
    def lower_is_better(self) -> bool:
        """True if the lower of two scores is the better one."""
        return self.task.score.better == "lower"

    def scores(self, weights: FlatArray, part: Part = "test") -> dict[str, float]:
        """Return all scores of the task that can be computed on a part, by name."""
        if not self.data.size(part):
            return {}
        reference = self._reference(weights)[0] if self.task.by_reference else None
        return self.task.figures(self.judged(weights, part), self.data.part(part)[1], reference)

    def threshold(self, weights: FlatArray) -> Threshold | None:
        """Return the error above which a sample is an anomaly; None if the task has none, or there are no
        samples.
        """
        if not isinstance(self.task, Reconstruction) or not self.num_samples:
            return None
        reference, of = self._reference(weights)
        quantile = self.task.section.anomaly_quantile
        known = false_alarms_of(len(reference), quantile, of) if of else None
        # The error of a sample can equal the threshold, and an exported model rounds it differently.
        return Threshold(self.task.threshold(reference) * (1 + ROUNDING), known)

    def _reference(self, weights: FlatArray) -> tuple[NDArray[Any], str]:
        """Return `judged` values of normal samples that define the threshold, and the name of their part.

        The validation samples are used if they suffice for the quantile, otherwise the test samples too.
        Without either, the training samples are used, with an empty name.
        """
        held_out: tuple[Part, ...] = ("validation", "test")
        normal = {part: self._normal(part) for part in held_out}
        enough = normal["validation"].size >= num_needed(self.task.section.anomaly_quantile)
        parts = [part for part in held_out[: 1 if enough else None] if normal[part].size]
        if not parts:
            return self.judged(weights, "train"), ""
        found = [self.judged(weights, part)[normal[part]] for part in parts]
        return np.concatenate(found), " and ".join(parts)

    def _normal(self, part: Part) -> Rows:
        """Return the indices of a part's samples that can be trained on."""
        labels = self.data.part(part)[1]
        found = self.task.trained_on(labels)
        return np.arange(len(labels)) if found is None else np.flatnonzero(found)

    def _figure(self, weights: FlatArray, part: Part, name: str) -> float | None:
        if not self.data.size(part):
            return None
        reference = self._reference(weights)[0] if name in self.task.by_reference else None
        return self.task.figure(name, self.judged(weights, part), self.data.part(part)[1], reference)

    def judged(self, weights: FlatArray, part: Part) -> NDArray[Any]:
        """Return the values that the task computes from a part's outputs, see `Task.judged`.

        The part must not be empty.
        """
        self.backend.look_at(weights)
        return np.concatenate(
            [self.task.judged(self.backend.evaluate(x, y)[1], y) for x, y in self._parts(part)]
        )

    def gain(self, weights: FlatArray, others: FlatArray, part: Part = "test") -> Gain | None:
        """Return how much better a model scores than another on the same samples; None if the part has no
        score.
        """
        if not self.data.size(part):
            return None
        ours, theirs = (self.judged(one, part) for one in (weights, others))
        return score_gain(self.task, ours, theirs, self.data.part(part)[1])

    def gradient(self, weights: FlatArray, rows: Rows | None = None) -> FlatArray:
        """Return the gradient of the mean loss in evaluation mode over all training samples or `rows`.

        Returns:
            float32, shape (spec.size,), 0 at statistics.
        """
        self.backend.look_at(weights)
        mean = np.zeros(self.spec.size, np.float32)
        chosen = np.arange(self.num_samples) if rows is None else rows
        for x, y in self._parts("train", chosen):
            self.backend.step(x, y, Key(0), training=False)
            self.backend.gradient[:] *= np.float32(len(y) / chosen.size)
            mean += self.backend.gradient
        return mean

    def batches(self, key: Key) -> Iterator[Rows]:
        """Yield the sample indices of each batch, in the order of `fit` with the same key.

        Raises:
            TrainingStopped: `stop` returned a reason.
        """
        slices = batch_slices(self.num_samples, self.settings.batch_size)
        done, num_batches = 0, num_local_steps(self.settings.epochs * len(slices), self.local_work)
        for epoch in range(math.ceil(self.settings.epochs * max(1.0, self.local_work)) if slices else 0):
            order = key.child("epoch", epoch).permutation(self.num_samples)
            for batch in slices[: num_batches - done]:
                if reason := self.stop():
                    raise TrainingStopped(f"training stopped after {done} of {num_batches} batches: {reason}")
                yield order[batch]
                done += 1
                self.progress(done / num_batches)

    def _parts(self, part: Part, rows: Rows | None = None) -> Iterator[tuple[InputArray, LabelArray]]:
        """Yield inputs and targets of a part, or of its samples `rows`, in small batches."""
        chosen = np.arange(self.data.size(part)) if rows is None else rows
        for start in range(0, chosen.size, _EVALUATION_BATCH):
            yield self._batch(part, chosen[start : start + _EVALUATION_BATCH])

    def _batch(self, part: Part, rows: Rows) -> tuple[InputArray, LabelArray]:
        x, y = self.data.batch(part, rows)
        return x, self.task.targets(x, y)
