"""Predicts what a round costs a device: a cost model, corrected by past rounds.

A real agent and the simulator use the same code, so nothing here reads a sensor or a clock. Faster training
or a faster link never raises a prediction.
"""

from dataclasses import dataclass, field

from msgspec import UNSET
from msgspec.structs import replace

from fleetune.edge_agent.budget.cost_history import CostHistory, Demand, Direction
from fleetune.edge_agent.training.descent import OptimiserFootprint, optimiser_footprint
from fleetune.edge_agent.training.local_training import batch_slices
from fleetune.edge_agent.training.trainers import Kind, trains_smaller
from fleetune.firmware_profiles import UNKNOWN, Board
from fleetune.protocols.bounds import LARGEST_AMOUNT
from fleetune.protocols.method.choice import EVALUATION_EPOCHS, Choice, DeviceReport
from fleetune.protocols.method.trainer import num_local_steps
from fleetune.protocols.round_cost import RoundCost
from fleetune.protocols.settings.section import PROCESSOR
from fleetune.protocols.wire.payloads import Enrolment

EVALUATIONS = 2  # test evaluations in a round: before and after local training
WRITTEN_COPIES = 2  # copies of the optimiser's state: its bytes for the disk, and the packed bytes
# Passes over the validation samples for losses and scores of the candidate, the local-only and the used
# model.
JUDGED_MODELS = 6
COMPARED_VERSIONS = 2  # versions compared with adoption.canary: the one on trial and the released one


@dataclass(frozen=True)
class MemoryModel:
    """Peak memory of a round, beyond what the process held after joining.

    Attributes:
        runtime_bytes: memory that the trainer takes in its first step.
        model_copies: float32 copies of the whole model, without those of the optimiser.
        payload_copies: copies of task and reply while they are read and written.
        batches_held: activations and their gradients in training, in units of
            `ModelSize.activation_bytes_per_sample` times the batch size.
        least_samples_held: the same for evaluation in samples, as it uses larger batches
            (`edge_agent.training.local_training`).
    """

    runtime_bytes: int
    model_copies: float
    payload_copies: float
    batches_held: float
    least_samples_held: int


# ONNX Runtime: fitted to first rounds of real agents that train an mlp of 4 million parameters with FedAvg
# (lossless and raw) and FedSPU (momentum 0.9). Their peaks, 164 to 222 MB, were 0 to 14 % below the forecast.
# The other figures are from sessions on LeNet-5, cnn-kapc, ResNet-8 and ResNet-18 (0.2 to 45 MB), in batches
# of 16 and 64, at ratios of 0.1, 0.4 and 1. Those with torch 2.13 were made before arrays were shared and
# states were streamed, so that a forecast for torch is now too high. After its first round, an agent corrects
# its forecast by the measured peak. onnxruntime-training 1.19 evaluates by the same graphs.
_ONNX = MemoryModel(16_000_000, 3.5, 0.5, 3, 48)
MEMORY_MODELS: dict[Kind, MemoryModel] = {
    "torch": MemoryModel(0, 3, 2.5, 1.5, 32),
    "onnx": _ONNX,
    "ort-training": _ONNX,
}


@dataclass(frozen=True)
class ModelSize:
    """Bytes that a run's model takes on a device.

    Attributes:
        num_bytes: one float32 copy of the trainable model.
        activation_bytes_per_sample: activations saved for the backward pass.
        frozen_bytes: frozen tensors, which the process holds once.
    """

    num_bytes: int
    activation_bytes_per_sample: float
    frozen_bytes: int = 0


@dataclass(frozen=True)
class LinkRates:
    """A device's link to its broker; None if unknown.

    Attributes:
        uplink_bps, downlink_bps: bits per second.
        latency_s: round-trip time; unknown counts as 0.
    """

    uplink_bps: float | None = None
    downlink_bps: float | None = None
    latency_s: float | None = None


@dataclass(frozen=True)
class BoardWatts:
    """Power draw of the whole board in each part of a round, in watts; None if unknown."""

    receive: float | None = None
    train: float | None = None
    transmit: float | None = None


@dataclass(frozen=True)
class AdoptionCost:
    """The work that [adoption] adds to the method's own work, averaged over rounds.

    Attributes:
        samples: extra training steps, counted in samples.
        model_copies: extra float32 copies of the model in memory.
    """

    samples: float = 0.0
    model_copies: float = 0.0


@dataclass(frozen=True)
class Capability:
    """The capability of a device before its first round in a run; values are None if unknown.

    Attributes:
        num_samples, num_test: sizes of its training and test splits.
        epochs, batch_size: the run's [training] settings.
        samples_per_s: training speed on all parameters.
        base_bytes: memory of the agent's process after joining and before any work, without frozen tensors.
        trainer: backend that trains.
        optimiser: numbers that the run's optimiser remembers.
        trains_smaller: see `edge_agent.training.trainers.trains_smaller`.
        train_on: processor or GPU that the trainer computes on.
    """

    num_samples: int
    epochs: int
    batch_size: int
    model: ModelSize
    num_test: int = 0
    samples_per_s: float | None = None
    base_bytes: int | None = None
    link: LinkRates = LinkRates()
    watts: BoardWatts = BoardWatts()
    trainer: Kind = "torch"
    optimiser: OptimiserFootprint = field(default_factory=OptimiserFootprint)
    adoption: AdoptionCost = AdoptionCost()
    trains_smaller: bool = False
    train_on: str = PROCESSOR


def capability_of(
    report: DeviceReport,
    board: Board,
    enrolment: Enrolment,
    *,
    trainer: Kind,
    num_test: int = 0,
    num_validation: int = 0,
    latency_s: float | None = None,
    base_bytes: int | None = None,
) -> Capability:
    """Return the capability of the device of `report` before its first round in a run.

    The watts come from the board's profile. The board "generic" has none.
    """
    known = board.name != UNKNOWN
    frozen_bytes = 4 * sum(tensor.size for tensor in enrolment.spec.frozen)
    return Capability(
        num_samples=report.num_samples,
        epochs=enrolment.training.epochs,
        batch_size=enrolment.training.batch_size,
        model=ModelSize(4 * enrolment.spec.size, enrolment.activation_bytes_per_sample, frozen_bytes),
        num_test=num_test,
        samples_per_s=report.samples_per_s,
        base_bytes=None if base_bytes is None else max(0, base_bytes - frozen_bytes),
        link=LinkRates(report.uplink_bps, report.downlink_bps, latency_s),
        watts=BoardWatts(board.receive_w, board.train_w, board.transmit_w) if known else BoardWatts(),
        trainer=trainer,
        optimiser=optimiser_footprint(enrolment.training),
        adoption=AdoptionCost(
            _adoption_samples(enrolment, report.num_samples, num_validation), _adoption_copies(enrolment)
        ),
        trains_smaller=trains_smaller(trainer, enrolment.spec),
    )


def _adoption_samples(enrolment: Enrolment, num_samples: int, num_validation: int) -> float:
    """Return how many samples the local-only models and evaluations of [adoption] take in a mean round."""
    section = enrolment.adoption
    if section is UNSET or not section.enabled:
        return 0.0
    models = JUDGED_MODELS + (COMPARED_VERSIONS if section.canary else 0)
    judged = models * EVALUATION_EPOCHS * num_validation
    if not section.compare_alone:
        return judged
    trained = num_samples + (num_samples + num_validation if section.alone_on_all else 0)
    return judged + enrolment.training.epochs * trained / section.compare_alone


def _adoption_copies(enrolment: Enrolment) -> float:
    """Return the model copies of [adoption]: local-only models and shared versions, old and new, and one
    evaluated.
    """
    section = enrolment.adoption
    if section is UNSET or not section.enabled:
        return 0.0
    extra_models = (1 + section.alone_on_all) if section.compare_alone else 0
    extra_models += COMPARED_VERSIONS if section.canary else 0
    return 1.0 + 2.0 * extra_models


def demand(choice: Choice, capability: Capability, local_work: float = 1.0) -> Demand:
    """Return what a round at `choice` with this share of local training needs, by the method's estimate."""
    cost, able = choice.cost, capability
    run_epochs = able.epochs * _share_done(able, local_work)
    epochs = cost.epochs(run_epochs, alone=able.trains_smaller)
    memory = MEMORY_MODELS[able.trainer]
    payloads = memory.payload_copies * (cost.bytes_down + cost.bytes_up)
    model_copies = memory.model_copies + able.optimiser.most_copies(cost.trainable_share)
    model_copies += WRITTEN_COPIES * able.optimiser.per_stored
    model_copies += able.adoption.model_copies
    copies = memory.runtime_bytes + model_copies * able.model.num_bytes + payloads
    samples_held = max(memory.batches_held * able.batch_size, memory.least_samples_held)
    held = samples_held * able.model.activation_bytes_per_sample
    return Demand(
        ratio=choice.ratio,
        bytes_down=cost.bytes_down,
        bytes_up=cost.bytes_up,
        samples=epochs * able.num_samples
        + EVALUATIONS * EVALUATION_EPOCHS * able.num_test
        + able.adoption.samples,
        working_bytes=round(copies + held) + cost.memory_bytes + able.model.frozen_bytes,
        uplink=choice.uplink,
    )


def _share_done(able: Capability, local_work: float) -> float:
    """Return the share of the run's steps that is done, in whole steps."""
    steps = able.epochs * len(batch_slices(able.num_samples, able.batch_size))
    return num_local_steps(steps, local_work) / steps if steps and local_work != 1 else 1.0


def predict(
    choice: Choice, capability: Capability, cost_history: CostHistory, local_work: float = 1.0
) -> RoundCost:
    """Return the predicted cost of a round at `choice` with this share of local training.

    A part of the cost is None if neither the device nor its past rounds determine it.
    """
    asked = demand(choice, capability, local_work)
    least_factor = 1.0 if choice.cost.bytes_vary else 0.0
    bytes_down = _bytes("down", asked, cost_history, least_factor)
    bytes_up = _bytes("up", asked, cost_history, least_factor)
    s_per_sample = cost_history.s_per_sample(choice.ratio)
    if s_per_sample is None and capability.samples_per_s:
        s_per_sample = 1 / capability.samples_per_s
    processor_s_per_sample = cost_history.processor_s_per_sample(choice.ratio)
    base_bytes = cost_history.base_bytes(choice.ratio)
    if base_bytes is None:
        base_bytes = capability.base_bytes
    expected = RoundCost(
        bytes_down=bytes_down,
        bytes_up=bytes_up,
        download_s=_seconds("down", bytes_down, capability, cost_history),
        train_s=None if s_per_sample is None else _bounded(s_per_sample * asked.samples),
        upload_s=_seconds("up", bytes_up, capability, cost_history),
        memory_bytes=None if base_bytes is None else max(0, base_bytes + asked.working_bytes),
    )
    if processor_s_per_sample is not None:
        expected = replace(expected, processor_s=_bounded(processor_s_per_sample * asked.samples))
    joules = _joules(expected, capability, cost_history)
    return replace(expected, joules=None if joules is None else _bounded(joules))


def _bounded(amount: float) -> float:
    """Return `amount`, limited to what a stored round cost may hold."""
    return amount if 0 <= amount <= LARGEST_AMOUNT else LARGEST_AMOUNT


def _bytes(direction: Direction, asked: Demand, cost_history: CostHistory, least_factor: float) -> int:
    factor = cost_history.bytes_factor(direction, asked.ratio, asked.uplink)
    return round(asked.estimate(direction) * (1.0 if factor is None else max(factor, least_factor)))


def _seconds(
    direction: Direction, num_bytes: int, capability: Capability, cost_history: CostHistory
) -> float | None:
    # A task follows its offer at once and is timed from it. A reply takes until its last byte is
    # acknowledged.
    latency_s = (capability.link.latency_s or 0.0) if direction == "up" else 0.0
    bps = capability.link.downlink_bps if direction == "down" else capability.link.uplink_bps
    link = cost_history.link(direction, latency_s, 8 / bps if bps else None)
    return None if link is None else _bounded(link.seconds(num_bytes))


def _joules(expected: RoundCost, capability: Capability, cost_history: CostHistory) -> float | None:
    """Return the joules by the board's watts, corrected by past rounds.

    If the board's watts are unknown, the mean watts of past rounds are used.
    """
    rates = capability.watts
    watts = [w for w in (rates.receive, rates.train, rates.transmit) if w is not None]
    known = len(watts) == 3
    receive_w, train_w, transmit_w = watts if known else (1.0, 1.0, 1.0)

    def nominal(of: RoundCost) -> float | None:
        if of.download_s is None or of.train_s is None or of.upload_s is None:
            return None
        return receive_w * of.download_s + train_w * of.train_s + transmit_w * of.upload_s

    joules, factor = nominal(expected), cost_history.joules_factor(nominal)
    if factor is None:
        return joules if known else None
    return None if joules is None else joules * factor
