"""What ONNX Runtime computes on: a card's provider where one is installed, never in silence another."""

from types import SimpleNamespace

import pytest
from tests.helpers import card
from tests.helpers.errors import raises

from fleetune.edge_agent.training.onnx_providers import check_used, providers
from fleetune.edge_agent.training.trainers import Trainers, make_backend
from fleetune.protocols.bundle.bundle import read_bundle
from fleetune.protocols.bundle.shipped import bundle_path
from fleetune.protocols.errors import ModelError

CUDA, TENSORRT, CPU = "CUDAExecutionProvider", "TensorrtExecutionProvider", "CPUExecutionProvider"


BY_RULE = {"cudnn_conv_algo_search": "HEURISTIC"}
OF_CUDA = BY_RULE | {"use_tf32": "0"}


def runtime(*there, version="1.31.0", **more):
    return SimpleNamespace(
        get_available_providers=lambda: list(there),
        set_default_logger_severity=lambda severity: None,
        __version__=version,
        **more,
    )


@pytest.mark.parametrize(
    ("device", "there", "wanted"),
    [
        ("cpu", [], [CPU]),
        ("cuda", [CUDA], [(CUDA, {"device_id": "0"} | OF_CUDA), CPU]),
        ("cuda:2", [TENSORRT, CUDA], [(CUDA, {"device_id": "2"} | OF_CUDA), CPU]),
        (
            "tensorrt",
            [TENSORRT, CUDA],
            [(TENSORRT, {"device_id": "0"}), (CUDA, {"device_id": "0"} | OF_CUDA), CPU],
        ),
        ("tensorrt:1", [TENSORRT], [(TENSORRT, {"device_id": "1"}), CPU]),
    ],
)
def test_the_first_that_can_and_what_goes_on_where_it_cannot(device, there, wanted):
    assert providers(runtime(*there), device) == wanted


def test_an_older_runtime_is_not_told_what_it_does_not_know():
    assert providers(runtime(CUDA, version="1.17.3"), "cuda")[0] == (CUDA, {"device_id": "0"} | BY_RULE)


def test_libraries_that_pip_installed_are_loaded_and_what_is_missing_is_not_printed(capsys):
    tried = []

    def preload_dlls():
        tried.append("once")
        print("Failed to load libcublas.so.13")

    providers(runtime(CUDA, preload_dlls=preload_dlls), "cpu")
    assert not tried
    providers(runtime(CUDA, preload_dlls=preload_dlls), "cuda")
    assert tried == ["once"]
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("device", ["mps", "cuda:x", "gpu", "", "cpu:1"])
def test_no_such_device(device):
    with raises(ModelError, f"device {device}", remedy=("cpu", "cuda")):
        providers(runtime(CUDA), device)


def test_what_is_installed_cannot():
    with raises(ModelError, "1.31.0", "tensorrt", remedy="onnxruntime-gpu"):
        providers(runtime(CUDA, CPU), "tensorrt")


def test_a_fall_back_to_the_processor_is_an_error():
    session = SimpleNamespace(get_providers=lambda: [CPU])
    check_used(session, "cpu")
    with raises(ModelError, "for cuda", remedy="--train-on"):
        check_used(session, "cuda")
    check_used(SimpleNamespace(get_providers=lambda: [CUDA, CPU]), "cuda")


def test_trainers_are_chosen_from_those_that_can():
    assert Trainers(train_on=card.NAME).usable == ("torch",)
    assert Trainers("torch", train_on=card.NAME).kind("any run") == "torch"
    with raises(ModelError, f"--train-on {card.NAME}", "onnxruntime", remedy="--train-on"):
        Trainers("onnx", train_on=card.NAME)
    with raises(ModelError, "--train-on gpu", "onnxruntime", "torch", remedy="--train-on"):
        Trainers(train_on="gpu")


def test_a_bundle_asks_for_the_device_it_is_given():
    bundle = read_bundle(bundle_path("mlp", (1, 8, 8), 10).read_bytes())
    with raises(ModelError, "device sun"):
        make_backend("onnx", bundle.spec, bundle, 1, device="sun")
