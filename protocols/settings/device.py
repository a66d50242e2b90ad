"""What devices heed of run.toml: the model, its samples, and how it is trained.

They are told it when they are enrolled, and a method's own section, [method], too; not where the coordinator
takes the model's weights and a simulation its data from.
"""

import math
from typing import Annotated, Literal

from msgspec import Meta

from fleetune.protocols.bounds import MOST_CLASSES, NonNegative, Positive
from fleetune.protocols.model.input_scaling import Mean, Std
from fleetune.protocols.settings.section import Count, Fraction, Settings
from fleetune.protocols.settings.simulation import Partition

MOST_INPUTS = 2**26  # numbers in one sample


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
    """

    name: str
    input_shape: tuple[Count, ...] | None = None
    num_classes: Annotated[int, Meta(ge=1, le=MOST_CLASSES)] | None = None
    weights: str | None = None
    init: Literal["default", "kaiming"] = "default"

    def __post_init__(self) -> None:
        if self.input_shape is not None and math.prod(self.input_shape) > MOST_INPUTS:
            raise ValueError(f"input_shape has more than {MOST_INPUTS:,} numbers in a sample")


class DataSection(Settings, frozen=True):
    """[data]

    Attributes:
        source: `digits`, `idx:FOLDER`, `cifar:FOLDER`, `har:FOLDER`, `npz:FILE` or
            `package.module:function`.
        partition: for simulations; a real device brings its own data.
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


class TrainingSection(Settings, frozen=True):
    """[training] Plain SGD: v = momentum * v + g + weight_decay * w; w -= learning_rate * v.

    Attributes:
        epochs: passes over a device's training samples in a round; a method may have its own.
        batch_size: samples a step; the last batch of an epoch is smaller, or larger by one.
        learning_rate: of every step; a method may have rates of its own beside it.
        momentum: of v, which begins at zero in every round.
        weight_decay: added to the gradient, as in torch's SGD.
    """

    epochs: Count = 1
    batch_size: Count = 32
    learning_rate: Positive = 0.05
    momentum: Fraction = 0.0
    weight_decay: NonNegative = 0.0
