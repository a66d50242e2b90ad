"""Shared by all tests: small models and devices, and where the real data lies."""

import os
import platform
import subprocess
import sys
import tempfile
from contextlib import suppress
from copy import copy
from pathlib import Path

import hypothesis
import numpy as np
import pytest

from fleetune.protocols.method.trainer import Fit, FitPlan
from fleetune.protocols.model.spec import ModelSpec, Span, TensorSpec
from fleetune.protocols.randomness import Key

os.environ.setdefault("OMP_NUM_THREADS", "1")
hypothesis.settings.register_profile("short", deadline=None, max_examples=25)
hypothesis.settings.register_profile("nightly", deadline=None, max_examples=100)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "short"))
DATA = Path(os.environ.get("FLEETUNE_DATA", Path(__file__).parents[2] / "shared" / "data"))

ORT_TRAINING = "onnxruntime-training-cpu==1.19.2"


@pytest.fixture(autouse=True)
def _the_same_draws_in_any_order():
    """Models that a test makes of torch start alike, whichever tests ran before in this process."""
    if torch := sys.modules.get("torch"):
        torch.manual_seed(0)


@pytest.fixture
def data_folder() -> Path:
    if not DATA.is_dir():
        pytest.skip(f"no real data at {DATA}; set FLEETUNE_DATA to the folder that holds it")
    return DATA


@pytest.fixture(scope="session")
def ort_training():
    """The folder that onnxruntime-training is in, to stand first in PYTHONPATH; kept from run to run."""
    if sys.version_info >= (3, 13) or (sys.platform, platform.machine()) != ("linux", "x86_64"):
        pytest.skip(
            f"there is no {ORT_TRAINING} for Python {platform.python_version()} on {platform.machine()}"
        )
    kept = Path(tempfile.gettempdir(), f"fleetune-{ORT_TRAINING}-{sys.implementation.cache_tag}")
    if not kept.is_dir():
        with tempfile.TemporaryDirectory() as folder:
            target = Path(folder, "packages")
            command = [
                sys.executable,
                "-m",
                "pip",
                "install",
                "-q",
                "--no-deps",
                "--target",
                target,
                ORT_TRAINING,
            ]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                pytest.skip(f"pip cannot get {ORT_TRAINING}: {done.stderr.strip().splitlines()[-1]}")
            with suppress(OSError):  # another process was faster
                target.rename(kept)
    return kept


@pytest.fixture
def manager(tmp_path):
    """A service manager whose NOTIFY_SOCKET is `tmp_path / "notify"`."""
    from tests.helpers.service_manager import Manager

    made = Manager(str(tmp_path / "notify"))
    yield made
    made.close()


def tiny_spec(hidden: int = 6) -> ModelSpec:
    """Two linear layers with a norm between: 4 inputs, `hidden` neurons, 3 classes."""
    neurons, inputs = (Span(0, 0, hidden),), ()
    return ModelSpec(
        name="tiny",
        tensors=(
            TensorSpec("a.weight", (hidden, 4), "weight", "a", (neurons, inputs), uses=1),
            TensorSpec("a.bias", (hidden,), "bias", "a", (neurons,)),
            TensorSpec("n.weight", (hidden,), "norm", "n", (neurons,)),
            TensorSpec("b.weight", (3, hidden), "weight", "b", ((), neurons), uses=1),
            TensorSpec("b.bias", (3,), "bias", "b", ((),)),
            TensorSpec("n.running_mean", (hidden,), "stat", "n", (neurons,)),
        ),
        groups=(hidden,),
        input_shape=(4,),
        num_classes=3,
    )


@pytest.fixture
def spec() -> ModelSpec:
    return tiny_spec()


@pytest.fixture
def weights(spec: ModelSpec) -> np.ndarray:
    return Key.of("weights").uniform(spec.size).astype(np.float32) - np.float32(0.5)


class PullToTarget:
    """A trainer whose loss is ||w - target||^2 / 2: exact, quick, and it honours every part of a plan."""

    def __init__(self, spec: ModelSpec, name: str, num_samples: int = 10, rate: float = 0.3) -> None:
        self.spec = spec
        self.num_samples = num_samples
        self.num_classes_held = 2
        self.num_test = 5
        self.rate = np.float32(rate)
        self.target = Key.of("target", name).uniform(spec.size).astype(np.float32)

    def in_round(
        self, number: int, optimiser_states: object, *, local_work: float = 1.0, **_: object
    ) -> "PullToTarget":
        part = copy(self)
        part.rate = self.rate * np.float32(local_work)
        return part

    def fit(self, weights: np.ndarray, plan: FitPlan, key: Key) -> Fit:
        gradient = self.gradient(weights)
        if plan.pull is not None:
            gradient = gradient + np.float32(2 * plan.pull.strength) * (weights - plan.pull.target)
        noise = (key.uniform(self.spec.size) * 0.01).astype(np.float32)
        step = self.rate * gradient + noise
        if plan.trainable is not None:
            step = np.where(plan.trainable, step, np.float32(0))
        moved = weights - step
        moved[self.spec.num_parameters :] = weights[self.spec.num_parameters :] * np.float32(0.9)
        return Fit(moved, self.loss(moved), 1, gradient if plan.keep_last_gradient else None)

    def loss(self, weights: np.ndarray, part: str = "train", rows: np.ndarray | None = None) -> float:
        return float(np.mean((weights - self.target) ** 2)) / 2 + {"validation": 0.1}.get(part, 0.0)

    def batches(self, key: Key) -> list[np.ndarray]:
        """Seven epochs of six."""
        return [rows for rows in np.array_split(key.permutation(self.num_samples), 6) if rows.size] * 7

    def gradient(self, weights: np.ndarray, rows: np.ndarray | None = None) -> np.ndarray:
        """A batch's target lies a little beside all samples' one, by its first row."""
        gradient = weights - self.target
        if rows is not None:
            gradient += np.float32(0.001) * np.float32(rows[0] - (self.num_samples - 1) / 2)
        gradient[self.spec.num_parameters :] = 0
        return gradient

    def accuracy(self, weights: np.ndarray, part: str = "test") -> float:
        return 1 / (1 + self.loss(weights))

    def score(self, weights: np.ndarray, part: str = "test") -> float:
        return self.accuracy(weights, part)

    lower_is_better = False
