"""`python -m tests.zoo.measure [NAME...] [--write FILE]`: export the zoo's models and train them.

Both trainers train each. Prints a line for each model, and writes a file of results for the documentation.
"""

import json
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path

import msgspec
import numpy as np
import torch
from tests.helpers.places import ROOT
from tests.zoo.models import ZOO, ZooModel
from tests.zoo.step_memory import KEY, random_batch

from fleetune.coordinator.export.make_bundle import make_run_model_bundle
from fleetune.coordinator.export.steps import prepare
from fleetune.coordinator.export.torch_comparison import TIMES_TORCH
from fleetune.coordinator.export.torch_reference import Reference
from fleetune.coordinator.spec.partial_training import described
from fleetune.coordinator.spec.spec_from_torch import weights_of
from fleetune.edge_agent.training.onnx_backend import OnnxBackend
from fleetune.edge_agent.training.torch_backend import TorchBackend
from fleetune.protocols.bundle.bundle import TRAIN
from fleetune.protocols.errors import ModelError
from fleetune.protocols.model.torch_backbone import frozen_values
from fleetune.protocols.settings.device import ModelSection
from fleetune.protocols.tasks import task_of

BATCHES = 3  # the best one counts: at a kink of ReLU rounding decides, but a wrong graph is always wrong
GRADIENT_FLOOR, WEIGHTS_FLOOR = 2e-5, 1e-3  # accepted without a look at torch's own error
STEPS, RATE = 3, 0.01
SECONDS = 600  # for one model
PACKAGES = {"tv": "torchvision", "timm": "timm", "hf": "transformers"}


@dataclass(frozen=True)
class Outcome:
    """What became of a model.

    Attributes:
        parameters: number of trained entries; 0 if it was not described.
        refusal: why it was not exported; "" if it was.
        seconds: processor time of its export.
        gradient_error: the error of the first gradient with ONNX Runtime, of its norm in float64.
        torch_gradient_error: that of torch in float32.
        weights_error: the error of the weights after three steps, relative to their change in float64.
        torch_weights_error: that of torch in float32.
        step_ratio: time of a step with ONNX Runtime over that with torch.
        megabytes: memory that three steps take with ONNX Runtime, above the process before its first step.
        torch_megabytes: the same with torch.
        groups: number of groups of neurons; `maskable` is the share of the entries in them.
    """

    parameters: int = 0
    refusal: str = ""
    seconds: float = 0.0
    gradient_error: float | None = None
    torch_gradient_error: float | None = None
    weights_error: float | None = None
    torch_weights_error: float | None = None
    step_ratio: float | None = None
    megabytes: float | None = None
    torch_megabytes: float | None = None
    groups: int = 0
    maskable: float = 0.0


def missing_package(model: ZooModel) -> str:
    """The package that the model needs and that is not installed; "" if none is missing."""
    start = model.name.split(":")[-1].partition("_")[0]
    wanted = "transformers" if model.name.endswith("bert_with_mask") else PACKAGES.get(start, "")
    return wanted if wanted and find_spec(wanted) is None else ""


def examine(model: ZooModel) -> Outcome:
    """Export a model and train it in both trainers, in this process."""
    shape = "inputs" if isinstance(model.shape, dict) else "input_shape"
    keys = {"name": model.path, shape: model.shape, "num_classes": model.classes}
    start = time.process_time()
    try:
        section = msgspec.convert(keys, ModelSection)  # as a run.toml is read
        bundle = make_run_model_bundle(section, KEY, model.task)
        seconds = time.process_time() - start
        spec, module = described(section, KEY)
    except (ModelError, msgspec.ValidationError) as problem:
        return Outcome(refusal=str(problem), seconds=time.process_time() - start)
    weights, task = weights_of(spec, module), task_of(model.task)
    exact = _Exact(spec, module, task)
    backends = [TorchBackend(spec, module, task), OnnxBackend(bundle)]
    errors = [_errors([*backends, exact], weights, index) for index in range(BATCHES)]
    gradient = min((one[:2] for one in errors), key=lambda one: excess(*one, GRADIENT_FLOOR))
    ends = min((one[2:] for one in errors), key=lambda one: excess(*one, WEIGHTS_FLOOR))
    return Outcome(
        spec.num_parameters,
        "",
        seconds,
        *(*gradient, *ends),
        _step_ratio(backends, weights),
        *(_megabytes_apart(bundle, trainer) for trainer in ("onnx", "torch")),
        len(spec.groups),
        spec.share_in_groups,
    )


def excess(error, torch_error, floor):
    """The error as a multiple of what the check of an export accepts, see `torch_comparison`."""
    return error / max(floor, TIMES_TORCH * torch_error)


class _Exact:
    """The module in float64 as a trainer, so that torch's own rounding can be told from a wrong graph."""

    def __init__(self, spec, module, task):
        self.spec, self._prepared = spec, prepare(spec, module, task)
        self._frozen = frozen_values(spec, module)
        self._reference = Reference(self._prepared, module, torch.float64)

    def load(self, weights):
        self.weights = weights.astype(np.float64)

    def step(self, x, y, key):
        given = {"x": x.astype(np.int64) if self._prepared.samples.ids else x, "y": y}
        for index, noise in enumerate(self._prepared.noises):
            given[f"noise:{index}"] = noise.draw(key, index, len(y))
        tensors = {one.name: value for one, value in self.spec.views(self.weights)} | self._frozen
        found = self._reference.run([TRAIN], tensors, given)[TRAIN]
        kinds = [("statistic" if one.kind == "stat" else "gradient", one.name) for one in self.spec.tensors]
        values = np.concatenate([found[f"{kind}:{name}"].ravel() for kind, name in kinds])
        self.gradient = values[: self.spec.num_parameters]
        self.weights[self.spec.num_parameters :] = values[self.spec.num_parameters :]


def _errors(trainers, weights, index):
    """Errors of ONNX Runtime and of torch: of the first gradient, and of the weights after three steps."""
    count, gradients, ends = trainers[0].spec.num_parameters, [], []
    for trainer in trainers:
        trainer.load(weights)
        for step in range(STEPS):
            trainer.step(*random_batch(trainers[0], index, step), KEY.child(index, step))
            if step == 0:
                gradients.append(trainer.gradient[:count].copy())
            trainer.weights[:count] -= RATE * trainer.gradient[:count]
        ends.append(trainer.weights[:count].copy())
    return [*_relative(gradients, 0), *_relative(ends, weights[:count])]


def _relative(found, start):
    """Errors of ONNX Runtime's and of torch's array, relative to the exact one's distance from `start`."""
    by_torch, by_onnx, exact = found
    return [float(np.linalg.norm(one - exact) / np.linalg.norm(exact - start)) for one in (by_onnx, by_torch)]


def _step_ratio(backends, weights):
    medians = []
    for backend in backends:
        backend.load(weights)
        times = []
        for step in range(7):
            given = random_batch(backend, 0, step)
            start = time.perf_counter()
            backend.step(*given, KEY)
            times.append(time.perf_counter() - start)
        medians.append(statistics.median(times[2:]))
    return medians[1] / medians[0]


def _megabytes_apart(bundle, trainer):
    """The memory of a trainer's steps, in a process that has imported nothing else."""
    with tempfile.NamedTemporaryFile() as file:
        file.write(bundle.encoded())
        file.flush()
        command = [sys.executable, "-W", "ignore", "-m", "tests.zoo.step_memory", trainer, file.name]
        done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=True)
    return float(done.stdout.splitlines()[-1])


def examine_apart(model: ZooModel) -> Outcome:
    """Examine a model in a process of its own, which may die or run too long."""
    command = [sys.executable, "-W", "ignore", "-m", "tests.zoo.measure", "--one", model.name]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, cwd=ROOT, check=False)
    except subprocess.TimeoutExpired:
        return Outcome(refusal=f"its export took more than {SECONDS} seconds")
    try:
        return Outcome(**json.loads(done.stdout.splitlines()[-1]))
    except (IndexError, ValueError):
        return Outcome(refusal=f"its process ended with {done.returncode}: {done.stderr[-300:]}")


def _row(model, outcome):
    def figure(value, form):
        return None if value is None else float(format(value, form))

    return [
        model.name,
        model.family,
        outcome.parameters or None,
        "no" if outcome.refusal else "yes",
        round(outcome.seconds, 1),
        figure(outcome.gradient_error, ".0e"),
        figure(outcome.torch_gradient_error, ".0e"),
        figure(outcome.weights_error, ".0e"),
        figure(outcome.torch_weights_error, ".0e"),
        figure(outcome.step_ratio, ".2f"),
        None if outcome.megabytes is None else round(outcome.megabytes),
        None if outcome.torch_megabytes is None else round(outcome.torch_megabytes),
        outcome.groups or None,
        round(100 * outcome.maskable) if outcome.groups else None,
        " ".join(outcome.refusal.removeprefix(f"model {model.path!r} cannot be exported: ").split())[:200],
    ]


COLUMNS = [
    "model", "family", "parameters", "exports", "export, processor s", "gradient error", "torch's",
    "error after 3 steps", "torch's own", "step, onnx / torch", "MB of steps", "torch's MB", "groups",
    "% in groups", "reason",
]  # fmt: skip
NOTE = (
    "Random first weights, batches of 16, one thread of an x86-64 processor that other work shared."
    " Errors are relative to float64. The time of an export includes its comparison with torch."
    " Memory is the growth of a process that trains with only this trainer."
)


def main(arguments: list[str]) -> None:
    torch.set_num_threads(1)
    if arguments[:1] == ["--one"]:
        (model,) = [one for one in ZOO if one.name == arguments[1]]
        print(json.dumps(asdict(examine(model))))
        return
    names, file = arguments, None
    if "--write" in arguments:
        place = arguments.index("--write")
        names, file = arguments[:place], Path(arguments[place + 1])
    rows = []
    for model in ZOO:
        if not names or model.name in names:
            rows.append(_row(model, examine_apart(model)))
            print(*rows[-1], sep=" | ", flush=True)
    if file:
        repeat = f"python -m tests.zoo.measure {' '.join([*names, '--write'])} {file}"
        file.write_text(
            json.dumps({"columns": COLUMNS, "rows": rows, "note": NOTE, "repeat": repeat}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main(sys.argv[1:])
