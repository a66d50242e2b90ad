"""What ONNX Runtime computes on: a card's provider where one is installed, never in silence another."""

from types import SimpleNamespace

import pytest
from tests.helpers import card

from fleetune.edge_agent.training.onnx_providers import check_used, providers
from fleetune.edge_agent.training.trainers import Trainers, make_backend
from fleetune.protocols.bundle.bundle import read_bundle
from fleetune.protocols.bundle.shipped import bundle_path
from fleetune.protocols.errors import ModelError

CUDA, TENSORRT, CPU = "CUDAExecutionProvider", "TensorrtExecutionProvider", "CPUExecutionProvider"


def runtime(*there):
    return SimpleNamespace(get_available_providers=lambda: list(there), __version__="1.31.0")


@pytest.mark.parametrize(
    ("device", "there", "wanted"),
    [
        ("cpu", [], [CPU]),
        ("cuda", [CUDA], [(CUDA, {"device_id": "0"}), CPU]),
        ("cuda:2", [TENSORRT, CUDA], [(CUDA, {"device_id": "2"}), CPU]),
        ("tensorrt", [TENSORRT, CUDA], [(TENSORRT, {"device_id": "0"}), (CUDA, {"device_id": "0"}), CPU]),
        ("tensorrt:1", [TENSORRT], [(TENSORRT, {"device_id": "1"}), CPU]),
    ],
)
def test_the_first_that_can_and_what_goes_on_where_it_cannot(device, there, wanted):
    assert providers(runtime(*there), device) == wanted


@pytest.mark.parametrize("device", ["mps", "cuda:x", "gpu", "", "cpu:1"])
def test_no_such_device(device):
    with pytest.raises(ModelError, match=f"onnxruntime trains on none called {device}; choose cpu, cuda"):
        providers(runtime(CUDA), device)


def test_what_is_installed_cannot():
    with pytest.raises(ModelError, match=r"onnxruntime 1\.31\.0 here cannot compute on tensorrt; it takes"):
        providers(runtime(CUDA, CPU), "tensorrt")


def test_a_fall_back_to_the_processor_is_an_error():
    session = SimpleNamespace(get_providers=lambda: [CPU])
    check_used(session, "cpu")
    with pytest.raises(ModelError, match="could not load what it needs for cuda"):
        check_used(session, "cuda")
    check_used(SimpleNamespace(get_providers=lambda: [CUDA, CPU]), "cuda")


def test_trainers_are_chosen_from_those_that_can():
    assert Trainers(train_on=card.NAME).usable == ("torch",)
    assert Trainers("torch", train_on=card.NAME).kind("any run") == "torch"
    with pytest.raises(ModelError, match=f"--train-on {card.NAME}: onnxruntime trains on none called"):
        Trainers("onnx", train_on=card.NAME)
    with pytest.raises(ModelError, match=r"--train-on gpu: onnxruntime .*; device gpu: torch here"):
        Trainers(train_on="gpu")


def test_a_bundle_asks_for_the_device_it_is_given():
    bundle = read_bundle(bundle_path("mlp", (1, 8, 8), 10).read_bytes())
    with pytest.raises(ModelError, match="trains on none called sun"):
        make_backend("onnx", bundle.spec, bundle, 1, device="sun")
