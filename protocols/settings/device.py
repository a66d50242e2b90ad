"""Sections of run.toml that devices use: the model, the samples, and local training.

The enrolment carries them to the devices together with [method]. Two keys stay behind: where the coordinator
finds the first weights, and where a simulation finds its data.
"""

import math
from typing import Annotated, Literal, TypeVar

from msgspec import Meta, field
from msgspec.structs import force_setattr

from fleetune.protocols.bounds import MAX_NUMBER, MOST_CLASSES, Label, NonNegative, Positive
from fleetune.protocols.model.input_scaling import Mean, Std
from fleetune.protocols.model.interface import MOST_INPUTS as MOST_NAMED_INPUTS
from fleetune.protocols.model.interface import InputName, InputType
from fleetune.protocols.settings.section import Count, Fraction, Settings
from fleetune.protocols.settings.simulation import Arrivals, Partition

T = TypeVar("T")
# the augmentations that Fleetune brings, see `edge_agent.training.augmentation`
AUGMENTATIONS = ("flip", "crop")
MOST_INPUTS = 2**26  # numbers in one sample


class AdapterSection(Settings, frozen=True):
    """[model] adapters: low-rank adapters (LoRA, Hu et al. 2021): W x becomes W x + alpha / rank * B A x.

    Attributes:
        rank: rank of B A. A has the shape (rank, inputs) and B (outputs, rank). In a convolution A has the
            layer's kernel size and B the kernel 1 x 1.
        of: patterns of the linear or convolutional layers that get an adapter, written as in `trainable`.
        alpha: scale of the adapters. If left out, it equals the rank, so that the factor is 1.
    """

    rank: Count
    of: Annotated[tuple[str, ...], Meta(min_length=1)]
    alpha: Positive | None = None


InputShape = tuple[Count, ...]


class InputSection(Settings, frozen=True):
    """[model] inputs: one of several inputs of a model.

    Attributes:
        shape: its shape in one sample.
        type: `float32`, `bool` or `int64`. If left out, the type is found.
    """

    shape: InputShape
    type: InputType | None = None


class ModelSection(Settings, frozen=True):
    """[model]

    Attributes:
        name: name of a built-in model, `package.module:function` that returns a torch module from
            (input_shape, num_classes), or `bundle:FILE` that `edge-coordinator export` wrote.
        input_shape: shape of one sample, e.g. [1, 28, 28]. If left out, the data source gives it.
        inputs: shape of each input of a model that takes several, e.g. { image = [1, 28, 28], age = [1] }, or
            shape and type, e.g. { ids = { shape = [16], type = "int64" } }. A sample is then one row with all
            of them (docs/your-model.md). Leave input_shape out.
        output: the entry of the model's output that has the logits, if the model returns a dict, an object or
            a tuple. If left out, the entry `logits`.
        num_classes: number of outputs of the model for one sample: the classes, the numbers of a label, or
            for reconstruction the numbers of a sample. If left out, the data source gives it.
        weights: the weights that the run starts from: `run:NAME`, the shared model of another run in the same
            folder, or a file: safetensors, or a state_dict that torch.save wrote. If left out, weights are
            drawn with the run's seed.
        init: distribution of the drawn weights. `default`: as torch initialises its layers. `kaiming`:
            convolutions are normal with variance 2 / fan out (He et al. 2015, as in torchvision), other
            layers as with `default`. Both give the same bits with and without torch.
        trainable: patterns of the layers that devices train, e.g. ["out", "block3.*"]; a module's name stands
            for all its layers. All other layers are frozen and travel once. Empty: every layer trains, or
            only the adapters if the model has `adapters`.
        adapters: low-rank adapters next to frozen layers, e.g. { rank = 4, of = ["block3.*"] }. If left out,
            there are none.
        backbone: number format of the frozen layers. `float32`, or `int8` with one scale for each output
            channel, which takes a quarter of the bytes (docs/pretrained.md).
    """

    name: str
    input_shape: tuple[Count, ...] | None = None
    inputs: Annotated[dict[InputName, InputShape | InputSection], Meta(max_length=MOST_NAMED_INPUTS)] = {}  # noqa: RUF012
    output: Label = ""
    num_classes: Annotated[int, Meta(ge=1, le=MOST_CLASSES)] | None = None
    weights: str | None = None
    init: Literal["default", "kaiming"] = "default"
    trainable: tuple[str, ...] = ()
    adapters: AdapterSection | None = None
    backbone: Literal["float32", "int8"] = "float32"

    def __post_init__(self) -> None:
        if self.inputs:
            row = (sum(math.prod(shape) for shape in self.shapes_of_inputs.values()),)
            if self.input_shape not in (None, row):
                raise ValueError("input_shape and inputs are given; leave input_shape out")
            force_setattr(self, "input_shape", row)
        if self.input_shape is not None and math.prod(self.input_shape) > MOST_INPUTS:
            raise ValueError(f"input_shape has more than {MOST_INPUTS:,} numbers in a sample")

    @property
    def shapes_of_inputs(self) -> dict[str, tuple[int, ...]]:
        """The shape of each input by name."""
        return {
            name: one.shape if isinstance(one, InputSection) else one for name, one in self.inputs.items()
        }

    @property
    def types_of_inputs(self) -> dict[str, InputType]:
        """The types of the inputs that have one here, by name."""
        given = self.inputs.items()
        return {name: one.type for name, one in given if isinstance(one, InputSection) and one.type}


class DataSection(Settings, frozen=True):
    """[data]

    Attributes:
        source: `digits`, `idx:FOLDER`, `cifar:FOLDER`, `har:FOLDER`, `npz:FILE`, `csv:FILE?label=COLUMN`,
            `audio:FOLDER?rate=HZ` (docs/data.md) or `package.module:function`.
        partition: section [data.partition], used by simulations only; a real device brings its own data.
        arrivals: section [data.arrivals], used by simulations whose devices' data grow.
        mean, std: input scaling. The model's input is (x - mean) / std, after bytes were divided by 255. Each
            is one number or a list with a number for each channel, e.g. mean = [0.4914, 0.4822, 0.4465].
        validation_fraction: fraction of the training samples that a device holds out for validation.
        class_names: names of the labels 0, 1, ...; devices write them into the models that they export.
    """

    source: str = "digits"
    partition: Partition = Partition()
    mean: Mean = 0.0
    std: Std = 1.0
    validation_fraction: Fraction = 0.0
    class_names: tuple[str, ...] = ()
    arrivals: Arrivals | None = None


def _always_sent(default: T) -> T:
    """Declare a key that the enrolment always contains. Other keys are left out at their default."""
    return field(default_factory=lambda: default)


class TrainingSection(Settings, frozen=True, omit_defaults=True):
    """[training] Local training. The optimisers follow torch.optim; every trainer computes the same.

    Attributes:
        epochs: passes over a device's training samples in a round. A method may define its own number.
        batch_size: samples in a step. The last batch of an epoch is smaller, or larger by one sample.
        learning_rate: learning rate of a step. A method may have further rates. The default suits sgd; adamw
            and rmsprop need smaller ones, e.g. 0.001.
        momentum: momentum of sgd and rmsprop.
        weight_decay: weight decay. sgd and rmsprop add weight_decay * w to the gradient, as torch does; adamw
            subtracts learning_rate * weight_decay * w from the weight.
        optimiser: sgd: v = momentum * v + g + weight_decay * w; w -= learning_rate * v. adamw and rmsprop: as
            torch.optim.AdamW and RMSprop.
        betas: decay rates of adamw's moments.
        eps: small constant in the denominator of adamw and rmsprop.
        alpha: decay rate of rmsprop's mean square.
        optimiser_state: lifetime of the optimiser's state (momentum, moments). `round`: it starts at zero in
            every round. `device`: a device keeps it from round to round.
        schedule: learning-rate schedule over rounds, see docs/training.md.
        warmup_rounds: number of first rounds in which the rate rises in equal steps.
        schedule_rounds: for cosine, the rounds until the rate is lowest and stays there; for step, the rounds
            between two steps. If left out, it is run.rounds for cosine and a third of that for step.
        schedule_factor: factor of one step of `schedule = "step"`.
        schedule_floor: fraction of the rate that `schedule = "cosine"` ends at.
        clip_norm: largest norm of a step's gradient over all trained entries. A longer gradient is scaled
            down, as by torch's clip_grad_norm_. If left out, gradients are not clipped.
        augment: data augmentation of the training batches: `flip`, `crop`, your own
            `package.module:function`, or a list of these that is applied in order (docs/training.md).
    """

    epochs: Count = _always_sent(1)
    batch_size: Count = _always_sent(32)
    learning_rate: Positive = _always_sent(0.05)
    momentum: Fraction = _always_sent(0.0)
    weight_decay: NonNegative = _always_sent(0.0)
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
        for key, default, which, used_by in _USED_BY:
            chosen = getattr(self, which)
            if chosen not in used_by and getattr(self, key) != default:
                raise ValueError(
                    f"{key} has no effect with {which} = {chosen}, only with {' and '.join(used_by)};"
                    " leave it out"
                )

    @property
    def augmentations(self) -> tuple[str, ...]:
        """The augmentations of `augment` in order, also if it is a single one."""
        return (self.augment,) if isinstance(self.augment, str) else self.augment


_USED_BY: tuple[tuple[str, object, str, tuple[str, ...]], ...] = (
    ("momentum", 0.0, "optimiser", ("sgd", "rmsprop")),
    ("betas", (0.9, 0.999), "optimiser", ("adamw",)),
    ("eps", 1e-8, "optimiser", ("adamw", "rmsprop")),
    ("alpha", 0.99, "optimiser", ("rmsprop",)),
    ("schedule_rounds", None, "schedule", ("cosine", "step")),
    ("schedule_factor", 0.1, "schedule", ("step",)),
    ("schedule_floor", 0.0, "schedule", ("cosine",)),
)
"""Keys that belong to some optimisers or schedules only: key, default, deciding key, its allowed values."""
