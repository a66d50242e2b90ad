"""What a round would take of a device: the cost model, corrected by what past rounds have shown.

The same for a real agent and for the simulator, so nothing here reads a sensor or a clock. More samples
a second or a faster link only ever lower a prediction.
"""

from dataclasses import dataclass

from msgspec.structs import replace

from edge_agent.experience import Demand, Direction, Experience, LinkTimes
from firmware_profiles import UNKNOWN, Board
from protocols.footprint import Footprint
from protocols.method import Choice, DeviceReport
from protocols.payloads import Enrolment

EVALUATIONS = 2  # of the test split a round: before local training and after it
FORWARD = 0.36  # evaluating a sample, relative to a training step on it: 2.75 times as fast (measured)

# Peak memory of a round, fitted to sessions with torch 2.13 on five models of 0.2 to 45 MB, batches of 16 to
# 128, ratios 0.2 and 1: the whole process (256 to 1,122 MB) was within 5 % of it.
MODEL_COPIES = 4  # beside what the process holds when it has joined
PAYLOAD_COPIES = 4  # of task and reply, while they are read and written
BATCHES_HELD = 1.5  # activations saved for the backward pass, and the gradients beside them
LEAST_SAMPLES_HELD = 32  # evaluation takes larger batches, but saves nothing


@dataclass(frozen=True)
class Capability:
    """What is known of a device in a run before it has done a round; None: not known.

    Attributes:
        num_samples, num_test: of its training and its test split.
        epochs, batch_size: of the run's [training].
        model_bytes: of one float32 copy of the model.
        activation_bytes_per_sample: saved for the backward pass.
        samples_per_s: full training steps, on every parameter.
        uplink_bps, downlink_bps: its link, bits a second.
        latency_s: what a transfer takes beside its bytes; not known counts as none.
        base_bytes: memory of the agent's process when it has joined the run and not yet worked.
        receive_w, train_w, transmit_w: drawn by the whole board meanwhile.
    """

    num_samples: int
    epochs: int
    batch_size: int
    model_bytes: int
    activation_bytes_per_sample: float
    num_test: int = 0
    samples_per_s: float | None = None
    uplink_bps: float | None = None
    downlink_bps: float | None = None
    latency_s: float | None = None
    base_bytes: int | None = None
    receive_w: float | None = None
    train_w: float | None = None
    transmit_w: float | None = None


def capability_of(
    report: DeviceReport,
    board: Board,
    enrolment: Enrolment,
    *,
    num_test: int = 0,
    latency_s: float | None = None,
    base_bytes: int | None = None,
) -> Capability:
    """What is known of the device of `report` in a run. The board gives the watts; "generic" claims none."""
    known = board.name != UNKNOWN
    return Capability(
        num_samples=report.num_samples,
        epochs=enrolment.training.epochs,
        batch_size=enrolment.training.batch_size,
        model_bytes=4 * enrolment.spec.size,
        activation_bytes_per_sample=enrolment.activation_bytes_per_sample,
        num_test=num_test,
        samples_per_s=report.samples_per_s,
        uplink_bps=report.uplink_bps,
        downlink_bps=report.downlink_bps,
        latency_s=latency_s,
        base_bytes=base_bytes,
        receive_w=board.receive_w if known else None,
        train_w=board.train_w if known else None,
        transmit_w=board.transmit_w if known else None,
    )


def demand(choice: Choice, capability: Capability) -> Demand:
    """What a round at `choice` asks of the device, by the method's estimate."""
    cost, able = choice.cost, capability
    epochs = cost.epochs(able.epochs)
    copies = MODEL_COPIES * able.model_bytes + PAYLOAD_COPIES * (cost.bytes_down + cost.bytes_up)
    held = max(BATCHES_HELD * able.batch_size, LEAST_SAMPLES_HELD) * able.activation_bytes_per_sample
    return Demand(
        ratio=choice.ratio,
        bytes_down=cost.bytes_down,
        bytes_up=cost.bytes_up,
        samples=epochs * able.num_samples + EVALUATIONS * FORWARD * able.num_test,
        working_bytes=copies + round(held) + cost.memory_bytes,
    )


def predict(choice: Choice, capability: Capability, experience: Experience) -> Footprint:
    """What one round at `choice` would take. What neither the device nor its past rounds tell is None."""
    asked = demand(choice, capability)
    bytes_down = _bytes("down", asked, experience)
    bytes_up = _bytes("up", asked, experience)
    s_per_sample = experience.s_per_sample(choice.ratio)
    if s_per_sample is None and capability.samples_per_s:
        s_per_sample = 1 / capability.samples_per_s
    base_bytes = experience.base_bytes(choice.ratio)
    if base_bytes is None:
        base_bytes = capability.base_bytes
    expected = Footprint(
        bytes_down=bytes_down,
        bytes_up=bytes_up,
        download_s=_seconds("down", bytes_down, capability, experience),
        train_s=None if s_per_sample is None else s_per_sample * asked.samples,
        upload_s=_seconds("up", bytes_up, capability, experience),
        memory_bytes=None if base_bytes is None else max(0, base_bytes + asked.working_bytes),
    )
    return replace(expected, joules=_joules(expected, capability, experience))


def _bytes(direction: Direction, asked: Demand, experience: Experience) -> int:
    factor = experience.bytes_factor(direction, asked.ratio)
    return round(asked.estimate(direction) * (1.0 if factor is None else factor))


def _seconds(
    direction: Direction, num_bytes: int, capability: Capability, experience: Experience
) -> float | None:
    link = experience.link(direction, capability.latency_s)
    bps = capability.downlink_bps if direction == "down" else capability.uplink_bps
    if link is None and bps:
        link = LinkTimes(capability.latency_s or 0.0, 8 / bps)
    return None if link is None else link.seconds(num_bytes)


def _joules(expected: Footprint, capability: Capability, experience: Experience) -> float | None:
    """By the board's watts, corrected; by the mean watts of past rounds where the board's are not known."""
    watts = [w for w in (capability.receive_w, capability.train_w, capability.transmit_w) if w is not None]
    known = len(watts) == 3
    receive_w, train_w, transmit_w = watts if known else (1.0, 1.0, 1.0)

    def nominal(of: Footprint) -> float | None:
        if of.download_s is None or of.train_s is None or of.upload_s is None:
            return None
        return receive_w * of.download_s + train_w * of.train_s + transmit_w * of.upload_s

    joules, factor = nominal(expected), experience.joules_factor(nominal)
    if factor is None:
        return joules if known else None
    return None if joules is None else joules * factor
