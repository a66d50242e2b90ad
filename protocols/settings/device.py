"""What devices heed of run.toml: the model, its samples, and how it is trained.

They are told it when they are enrolled, and a method's own section, [method], too; not where the coordinator
takes the model's weights and a simulation its data from.
"""

import math
from typing import Annotated, Literal, TypeVar

from msgspec import Meta, field

from fleetune.protocols.bounds import MAX_NUMBER, MOST_CLASSES, Label, NonNegative, Positive
from fleetune.protocols.model.input_scaling import Mean, Std
from fleetune.protocols.settings.section import Count, Fraction, Settings
from fleetune.protocols.settings.simulation import Arrivals, Partition

T = TypeVar("T")
AUGMENTATIONS = ("flip", "crop")  # those of ours, see `edge_agent.training.augmentation`
MOST_INPUTS = 2**26  # numbers in one sample


class AdapterSection(Settings, frozen=True):
    """[model] adapters: low-rank adapters (LoRA, Hu et al. 2021): W x becomes W x + alpha / rank * B A x.

    Attributes:
        rank: of B A; A is (rank, inputs), B (outputs, rank), of a convolution its kernel and 1 x 1.
        of: patterns of the layers, linear or convolutional, that get one; see `trainable`.
        alpha: None: the rank, so that the factor is 1.
    """

    rank: Count
    of: Annotated[tuple[str, ...], Meta(min_length=1)]
    alpha: Positive | None = None


class ModelSection(Settings, frozen=True):
    """[model]

    Attributes:
        name: of a built-in model, `package.module:function` that returns a torch module from
            (input_shape, num_classes), or `bundle:FILE` that `edge-coordinator export` wrote.
        input_shape: of one sample, e.g. [1, 28, 28]; None: as data.source has it.
        num_classes: how many numbers the model gives for a sample: its classes, or what else the task asks
            for (the numbers of a label; for reconstruction, those of a sample). None: as data.source has it.
        weights: what the run starts from: `run:NAME`, the shared model of another run in the same folder of
            runs, or a safetensors file; None: weights drawn with the run's seed.
        init: how they are drawn: `default`, as torch does; or `kaiming`: convolutions normal with variance
            2 / fan out (He et al. 2015, torchvision), the rest as by default; the same bits without torch.
        trainable: patterns of the layers that devices train, e.g. ["out", "block3.*"]; a pattern that names a
            module means all layers in it. The rest is frozen, and travels once. Empty: every layer, or with
            `adapters` none but these.
        adapters: low-rank adapters beside frozen layers, e.g. { rank = 4, of = ["block3.*"] }; None: none.
        backbone: the numbers of what is frozen: `float32`; or `int8`, weights in a quarter of the bytes, each
            output channel with a scale of its own, see docs/pretrained.md.
    """

    name: str
    input_shape: tuple[Count, ...] | None = None
    num_classes: Annotated[int, Meta(ge=1, le=MOST_CLASSES)] | None = None
    weights: str | None = None
    init: Literal["default", "kaiming"] = "default"
    trainable: tuple[str, ...] = ()
    adapters: AdapterSection | None = None
    backbone: Literal["float32", "int8"] = "float32"

    def __post_init__(self) -> None:
        if self.input_shape is not None and math.prod(self.input_shape) > MOST_INPUTS:
            raise ValueError(f"input_shape has more than {MOST_INPUTS:,} numbers in a sample")


class DataSection(Settings, frozen=True):
    """[data]

    Attributes:
        source: `digits`, `idx:FOLDER`, `cifar:FOLDER`, `har:FOLDER`, `npz:FILE`,
            `csv:FILE?label=COLUMN`, `audio:FOLDER?rate=HZ` (docs/data.md) or `package.module:function`.
        partition: for simulations; a real device brings its own data.
        arrivals: for simulations: a section [data.arrivals], where devices' data grow.
        mean, std: float input = (x / 255 if x is uint8 else x) minus mean, over std; each one number, or a
            list with a number for each channel, e.g. mean = [0.4914, 0.4822, 0.4465].
        validation_fraction: of the training samples, held out for methods that need a validation loss.
        class_names: of the labels 0, 1, ...; for the models that devices export.
    """

    source: str = "digits"
    partition: Partition = Partition()
    mean: Mean = 0.0
    std: Std = 1.0
    validation_fraction: Fraction = 0.0
    class_names: tuple[str, ...] = ()
    arrivals: Arrivals | None = None


def _told(default: T) -> T:
    """A key that an enrolment always has; the others only where they differ from their default."""
    return field(default_factory=lambda: default)


class TrainingSection(Settings, frozen=True, omit_defaults=True):
    """[training] The optimisers are those of torch.optim; what they are told holds for every trainer.

    Attributes:
        epochs: passes over a device's training samples in a round; a method may have its own.
        batch_size: samples a step; the last batch of an epoch is smaller, or larger by one.
        learning_rate: of every step; a method may have rates of its own beside it. The default is one for
            sgd: adamw and rmsprop want smaller ones, 0.001 for a start.
        momentum: of sgd and rmsprop.
        weight_decay: of sgd and rmsprop: added to the gradient, as torch does; of adamw: times the learning
            rate and the weight, taken off the weight.
        optimiser: sgd: v = momentum * v + g + weight_decay * w; w -= learning_rate * v. adamw, rmsprop: as
            torch.optim.AdamW and RMSprop.
        betas: of adamw.
        eps: of adamw and rmsprop.
        alpha: of rmsprop.
        optimiser_state: what the optimiser remembers (momentum, moments) begins at zero in every `round`, or
            is kept on the `device` from round to round.
        schedule: of the learning rate over rounds, see docs/training.md: `constant`, `cosine` or `step`.
        warmup_rounds: in the first so many rounds the rate rises in equal steps.
        schedule_rounds: of cosine: rounds from the start of the run until it is lowest, where it stays; of
            step: rounds from one step to the next. None: all of run.rounds, or a third of them.
        schedule_factor: of step: each step multiplies the rate by it.
        schedule_floor: of cosine: the share of the rate that it falls to.
        clip_norm: a step's gradient, over all entries that train, is scaled down to this norm where it is
            longer, as by torch's clip_grad_norm_; None: it is not.
        augment: makes other batches of a device's training samples: `flip`, `crop`, `package.module:function`
            of yours, or a list of these, one after the other; see docs/training.md.
    """

    epochs: Count = _told(1)
    batch_size: Count = _told(32)
    learning_rate: Positive = _told(0.05)
    momentum: Fraction = _told(0.0)
    weight_decay: NonNegative = _told(0.0)
    optimiser: Literal["sgd", "adamw", "rmsprop"] = "sgd"
    betas: tuple[Fraction, Fraction] = (0.9, 0.999)
    eps: Positive = 1e-8
    alpha: Fraction = 0.99
    optimiser_state: Literal["round", "device"] = "round"
    schedule: Literal["constant", "cosine", "step"] = "constant"
    warmup_rounds: Annotated[int, Meta(ge=0, le=MAX_NUMBER)] = 0
    schedule_rounds: Count | None = None
    schedule_factor: Annotated[float, Meta(gt=0, le=1)] = 0.1
    schedule_floor: Fraction = 0.0
    clip_norm: Positive | None = None
    augment: Label | Annotated[tuple[Label, ...], Meta(max_length=20)] = ()

    def __post_init__(self) -> None:
        for name in self.augmentations:
            if name not in AUGMENTATIONS and ":" not in name:
                known = ", ".join(AUGMENTATIONS)
                raise ValueError(f"augment: no augmentation {name!r}; {known}, or package.module:function")
        for key, default, which, heeded_by in _HEEDED_BY:
            chosen = getattr(self, which)
            if chosen not in heeded_by and getattr(self, key) != default:
                raise ValueError(
                    f"{key} means nothing to {which} {chosen}, only to {' and '.join(heeded_by)}"
                )

    @property
    def augmentations(self) -> tuple[str, ...]:
        """Those of `augment`, in their order."""
        return (self.augment,) if isinstance(self.augment, str) else self.augment


_HEEDED_BY: tuple[tuple[str, object, str, tuple[str, ...]], ...] = (
    ("momentum", 0.0, "optimiser", ("sgd", "rmsprop")),
    ("betas", (0.9, 0.999), "optimiser", ("adamw",)),
    ("eps", 1e-8, "optimiser", ("adamw", "rmsprop")),
    ("alpha", 0.99, "optimiser", ("rmsprop",)),
    ("schedule_rounds", None, "schedule", ("cosine", "step")),
    ("schedule_factor", 0.1, "schedule", ("step",)),
    ("schedule_floor", 0.0, "schedule", ("cosine",)),
)
"""Keys with their defaults that only some optimisers or schedules heed."""
