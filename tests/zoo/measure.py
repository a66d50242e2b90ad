"""`python -m tests.zoo.measure [NAME...] [--write FILE]`: export the zoo's models and train them.

Both trainers train each. Prints a line for each model, and writes a file of results for the documentation.
"""

import json
import statistics
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path

import msgspec
import numpy as np
import torch
from tests.helpers.places import ROOT
from tests.zoo.models import ZOO, ZooModel

from fleetune.coordinator.export.make_bundle import make_run_model_bundle
from fleetune.coordinator.spec.partial_training import described
from fleetune.coordinator.spec.spec_from_torch import weights_of
from fleetune.edge_agent.training.onnx_backend import OnnxBackend
from fleetune.edge_agent.training.torch_backend import TorchBackend
from fleetune.protocols.errors import ModelError
from fleetune.protocols.randomness import Key
from fleetune.protocols.settings.device import ModelSection
from fleetune.protocols.tasks import task_of

KEY = Key.of("zoo")
BATCHES = (
    3  # the smallest error counts: at a kink of ReLU rounding decides, but a wrong graph is always wrong
)
SAMPLES, STEPS, RATE = 16, 3, 0.01
SECONDS = 600  # for one model
PACKAGES = {"tv": "torchvision", "timm": "timm", "hf": "transformers"}


@dataclass(frozen=True)
class Outcome:
    """What became of a model.

    Attributes:
        parameters: number of trained entries; 0 if it was not described.
        refusal: why it was not exported; "" if it was.
        seconds: processor time of its export.
        gradient_error: the difference of both trainers' gradients, relative to their norm.
        weights_error: the difference of their weights after three steps, relative to the way from the first.
        step_ratio: time of a step with ONNX Runtime over that with torch.
        groups: number of groups of neurons; `maskable` is the share of the entries in them.
    """

    parameters: int = 0
    refusal: str = ""
    seconds: float = 0.0
    gradient_error: float | None = None
    weights_error: float | None = None
    step_ratio: float | None = None
    groups: int = 0
    maskable: float = 0.0


def missing_package(model: ZooModel) -> str:
    """The package that the model needs and that is not installed; "" if none is missing."""
    start = model.name.split(":")[-1].partition("_")[0]
    wanted = "transformers" if model.name.endswith("bert_with_mask") else PACKAGES.get(start, "")
    return wanted if wanted and find_spec(wanted) is None else ""


def examine(model: ZooModel) -> Outcome:
    """Export a model and train it in both trainers, in this process."""
    keys = {"name": model.path, "input_shape": model.shape, "num_classes": model.classes}
    start = time.process_time()
    try:
        section = msgspec.convert(keys, ModelSection)  # as a run.toml is read
        bundle = make_run_model_bundle(section, KEY, model.task)
        seconds = time.process_time() - start
        spec, module = described(section, KEY)
    except (ModelError, msgspec.ValidationError) as problem:
        return Outcome(refusal=str(problem), seconds=time.process_time() - start)
    weights = weights_of(spec, module)
    backends = [TorchBackend(spec, module, task_of(model.task)), OnnxBackend(bundle)]
    errors = [_errors(backends, weights, index) for index in range(BATCHES)]
    masked = sum(one.size for one in spec.tensors if one.kind != "stat" and any(one.axes))
    return Outcome(
        spec.num_parameters,
        "",
        seconds,
        min(one for one, _ in errors),
        min(one for _, one in errors),
        _step_ratio(backends, weights),
        len(spec.groups),
        masked / spec.num_parameters,
    )


def _errors(backends, weights, index):
    """The errors of the gradient of the first step, and of the weights after three steps."""
    gradients, ends = [], []
    for backend in backends:
        backend.load(weights)
        for step in range(STEPS):
            backend.step(*_batch(backend, index, step), KEY.child(index, step))
            if step == 0:
                gradients.append(backend.gradient.copy())
            backend.weights[: backend.spec.num_parameters] -= (
                RATE * backend.gradient[: backend.spec.num_parameters]
            )
        ends.append(backend.weights.copy())
    way = np.linalg.norm(ends[0] - weights)
    return (
        float(np.linalg.norm(gradients[1] - gradients[0]) / np.linalg.norm(gradients[0])),
        float(np.linalg.norm(ends[1] - ends[0]) / way),
    )


def _batch(backend, index, step):
    rng, spec, task = KEY.child("batch", index, step).generator(), backend.spec, backend.task
    shape = (SAMPLES, *spec.input_shape)
    if backend.vocabulary is None:
        x = rng.normal(size=shape).astype(np.float32)
    else:
        x = rng.integers(backend.vocabulary, size=shape)
    target = task.target_shape(spec.num_classes, spec.input_shape)
    if target:
        return x, rng.normal(size=(SAMPLES, *target)).astype(np.float32)
    return x, rng.integers(spec.num_classes, size=SAMPLES)


def _step_ratio(backends, weights):
    medians = []
    for backend in backends:
        backend.load(weights)
        times = []
        for step in range(7):
            given = _batch(backend, 0, step)
            start = time.perf_counter()
            backend.step(*given, KEY)
            times.append(time.perf_counter() - start)
        medians.append(statistics.median(times[2:]))
    return medians[1] / medians[0]


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
        figure(outcome.weights_error, ".0e"),
        figure(outcome.step_ratio, ".2f"),
        outcome.groups or None,
        round(100 * outcome.maskable) if outcome.groups else None,
        " ".join(outcome.refusal.removeprefix(f"model {model.path!r} cannot be exported: ").split())[:200],
    ]


COLUMNS = [
    "model", "family", "parameters", "exports", "export, processor s", "gradient error",
    "error after 3 steps", "step, onnx / torch", "groups", "% in groups", "reason",
]  # fmt: skip


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
        file.write_text(json.dumps({"columns": COLUMNS, "rows": rows, "repeat": repeat}, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
