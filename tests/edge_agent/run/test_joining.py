"""Joining a run: what a device refuses, and why."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from tests.helpers import card

from fleetune.coordinator.run.enrolment import prepare
from fleetune.edge_agent.budget.board_meter import BoardMeter
from fleetune.edge_agent.budget.owner_policy import Policy
from fleetune.edge_agent.extensions.adoption.deployed_model import DeployedModel, ModelRecord
from fleetune.edge_agent.probes.link_speed import LinkSpeed
from fleetune.edge_agent.run import first_ratio, memory_room, run_backend
from fleetune.edge_agent.run.device import Device, DeviceSettings
from fleetune.edge_agent.run.intake import Intake
from fleetune.edge_agent.run.joining import join
from fleetune.edge_agent.state.agent_store import AgentStore
from fleetune.edge_agent.training.trusted_code import check_trust
from fleetune.protocols.bundle.shipped import bundle_path
from fleetune.protocols.errors import FleetuneError, ReadingStopped, SettingError, StoreVersion
from fleetune.protocols.method.choice import Budget
from fleetune.protocols.round_cost import RoundCost
from fleetune.protocols.settings.run_toml import parse_run
from fleetune.protocols.update import codec
from fleetune.protocols.wire.messages import Ack, Offer, TransferKey
from fleetune.protocols.wire.payloads import Enrolment
from fleetune.protocols.wire.transfer import Chunk, digest_of, transfer_id

LINK = LinkSpeed(uplink_bps=2e6, downlink_bps=10e6, round_trip_s=0.04)
USER_MODEL = "usermodel:two_layers"


@pytest.fixture(autouse=True)
def small_process(monkeypatch):
    """A process that has run a thousand tests holds more than a board has."""
    for module in (first_ratio, memory_room, run_backend):
        monkeypatch.setattr(module, "process_memory", lambda: SimpleNamespace(resident=250_000_000))


@pytest.fixture
def user_code(tmp_path, monkeypatch):
    (tmp_path / "usermodel.py").write_text(
        "from torch import nn\n"
        "def two_layers(input_shape, num_classes):\n"
        "    return nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.ReLU(), nn.Linear(8, num_classes))\n"
        "def normed(input_shape, num_classes):\n"
        "    return nn.Sequential(nn.Flatten(), nn.BatchNorm1d(64), nn.Linear(64, num_classes))\n"
    )
    (tmp_path / "useraugment.py").write_text(
        "def half(x, y, draws):\n    return x / 2, y\ndef fails(x, y, draws):\n    raise KeyError('no')\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))


def enrolment(**sections) -> Enrolment:
    content = {
        "run": {"name": "r"},
        "model": {"name": "mlp", "input_shape": [1, 8, 8], "num_classes": 10},
        "method": {"name": "fedspu"},
    }
    return prepare(parse_run({**content, **sections}))


def joined(
    enrolled: Enrolment,
    folder: Path,
    link=LINK,
    kind="torch",
    stop=lambda: None,
    data="digits",
    **settings,
):
    chosen = DeviceSettings(fleet="f", device="d", data=data, state=folder, **settings)
    device = Device(chosen, AgentStore(folder), BoardMeter(folder / "no-sensors"), None, lambda: link)
    return join(
        device,
        enrolled.run,
        codec.encode(enrolled, enrolled.spec),
        kind=kind,
        stop=stop,
        progress=lambda _: None,
    )


def refusal(enrolled: Enrolment, folder: Path, **settings) -> str:
    with pytest.raises(FleetuneError) as caught:
        joined(enrolled, folder, **settings)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_device_starts_from_the_fleets_model_at_the_largest_ratio_that_fits(tmp_path):
    enrolled = enrolment()
    taken = joined(enrolled, tmp_path, board="raspberry-pi-3b-plus")
    assert np.array_equal(taken.session.personal_model, enrolled.weights)
    assert taken.report.ratio == 1
    assert taken.report.num_samples > 1000
    assert (taken.report.uplink_bps, taken.report.downlink_bps) == (2e6, 10e6)
    assert taken.report.samples_per_s > 100  # measured here, not the board's figure
    assert taken.report.round_s is not None


def test_a_stop_while_its_samples_are_read_ends_joining(tmp_path):
    np.savez(tmp_path / "a.npz", x=np.zeros((20_000, 1, 8, 8), np.float32), y=np.arange(20_000) % 10)
    with pytest.raises(ReadingStopped):
        joined(enrolment(), tmp_path, data=f"npz:{tmp_path}/a.npz", stop=lambda: "it leaves")


def test_the_link_is_probed_once_a_run_also_through_restarts(tmp_path):
    enrolled, other = enrolment(), LinkSpeed(uplink_bps=1.0, downlink_bps=1.0)
    joined(enrolled, tmp_path)
    again = joined(enrolled, tmp_path, link=other)
    assert (again.report.uplink_bps, again.report.downlink_bps) == (2e6, 10e6)
    assert joined(enrolment(), tmp_path, link=other).report.uplink_bps == 1.0


def test_what_rounds_taught_holds_for_the_trainer_they_were_done_with(tmp_path):
    enrolled, store, took = enrolment(), AgentStore(tmp_path), RoundCost(memory_bytes=300_000_000)
    store.keep_bundle(enrolled.run, bundle_path("mlp", (1, 8, 8), 10).read_bytes())
    before = joined(enrolled, tmp_path)
    store.ratio_controller(enrolled.run).write(
        before.planner.ratio_controller.learned(Budget(), took).encoded()
    )
    assert len(joined(enrolled, tmp_path).planner.ratio_controller.cost_history.past_rounds) == 1
    other = joined(enrolled, tmp_path, link=LinkSpeed(uplink_bps=1.0), kind="onnx")
    assert other.planner.ratio_controller.capability.trainer == "onnx"
    assert other.planner.ratio_controller.cost_history.past_rounds == ()
    assert other.report.uplink_bps == 2e6  # the link is the same


def test_a_card_trains_as_the_owner_says_and_its_speed_is_its_own(tmp_path):
    enrolled, store, took = enrolment(), AgentStore(tmp_path), RoundCost(memory_bytes=300_000_000)
    here = joined(enrolled, tmp_path)
    store.ratio_controller(enrolled.run).write(
        here.planner.ratio_controller.learned(Budget(), took).encoded()
    )
    there = joined(enrolled, tmp_path, train_on=card.NAME).planner.ratio_controller
    assert there.capability.train_on == card.NAME
    assert there.cost_history.past_rounds == ()
    assert "finds no" in refusal(enrolled, tmp_path, train_on="xpu")


def serve(store: AgentStore, enrolled: Enrolment, weights, run="") -> None:
    spec, run = enrolled.spec, run or enrolled.run
    record = ModelRecord(run, 3, False, spec.hash, spec.input_shape, spec.num_classes)
    store.deployed.write(codec.encode(DeployedModel(record, weights), spec))


def test_the_same_model_and_trainer_carry_what_rounds_taught_into_the_next_run(tmp_path):
    first, second, store = enrolment(), enrolment(), AgentStore(tmp_path)
    took, thin = RoundCost(memory_bytes=300_000_000), LinkSpeed(uplink_bps=1.0, downlink_bps=1.0)
    before = joined(first, tmp_path)
    store.enrolment(first.run).write(codec.encode(first, first.spec))
    store.ratio_controller(first.run).write(before.planner.ratio_controller.learned(Budget(), took).encoded())
    taken = joined(second, tmp_path, link=thin)
    assert len(taken.planner.ratio_controller.cost_history.past_rounds) == 1
    assert taken.report.uplink_bps == 2e6
    larger = enrolment(model={"name": "mlp", "input_shape": [1, 8, 8], "num_classes": 11})
    assert joined(larger, tmp_path, link=thin).planner.ratio_controller.cost_history.past_rounds == ()
    store.keep_bundle(second.run, bundle_path("mlp", (1, 8, 8), 10).read_bytes())
    assert joined(second, tmp_path, kind="onnx").planner.ratio_controller.cost_history.past_rounds == ()


def test_a_run_that_continues_another_begins_with_the_model_a_device_serves(tmp_path):
    first, store = enrolment(), AgentStore(tmp_path)
    second = replace(enrolment(), continues=first.run)
    common, own = first.weights, first.weights + np.float32(0.5)
    serve(store, first, own)
    assert np.array_equal(joined(enrolment(), tmp_path).session.personal_model, common)
    assert np.array_equal(joined(second, tmp_path).session.personal_model, own)
    serve(store, first, own, run="an-earlier-one")
    assert np.array_equal(joined(second, tmp_path).session.personal_model, common)  # it was not in `first`
    store.session(first.run).write(b"it was")
    assert np.array_equal(joined(second, tmp_path).session.personal_model, own)
    other = enrolment(model={"name": "mlp", "input_shape": [1, 8, 8], "num_classes": 11})
    serve(store, other, other.weights, run=first.run)
    assert np.array_equal(joined(second, tmp_path).session.personal_model, common)


def test_a_damaged_served_model_is_named(tmp_path):
    AgentStore(tmp_path).deployed.write(b"damaged")
    assert "deployed, the model that this device deploys, is damaged" in refusal(enrolment(), tmp_path)


def test_a_download_is_timed_only_by_the_process_that_saw_all_of_it(tmp_path):
    clock, store, payload = iter(range(100)), AgentStore(tmp_path), b"an enrolment"
    transfer_key, digest = TransferKey("enrolment", "r"), digest_of(payload)
    offer = Offer(transfer_id(transfer_key, "d", digest), digest, len(payload), transfer_key)

    def intake():
        return Intake(
            "d",
            store,
            joined=lambda: None,
            reason_not_to_train=lambda: None,
            clock=lambda: float(next(clock)),
        )

    first = intake()
    first.handle_offer(offer)
    first.keep(first.handle_chunk(Chunk(offer.transfer, 0, payload).encode(), 0.0))
    assert first.download_s(offer.transfer) > 0
    assert first.download_s("1" * 32) is None
    second = intake()
    assert second.handle_offer(offer) == Ack(offer.transfer, len(payload))
    assert second.download_s(offer.transfer) is None


def test_the_owner_may_want_less(tmp_path):
    assert joined(enrolment(), tmp_path, policy=Policy(ratio=0.7)).report.ratio == 0.7


def test_what_is_too_much_for_the_link_is_not_chosen(tmp_path):
    thin = LinkSpeed(uplink_bps=5e3, downlink_bps=10e6, round_trip_s=0.04)
    taken = joined(enrolment(round={"deadline_s": 10}), tmp_path, link=thin)
    assert 0 < taken.report.ratio < 1
    assert "would need" in taken.report.reason
    assert "Mbit/s" in taken.report.reason


def test_where_nothing_fits_it_says_so_and_takes_no_part_for_the_time_being(tmp_path):
    taken = joined(enrolment(round={"deadline_s": 1e-6}), tmp_path, board="raspberry-pi-zero-2w")
    assert taken.refusal.startswith("nothing fits: 0.1 would need ")
    assert joined(enrolment(), tmp_path).refusal is None


def test_code_is_imported_only_from_modules_the_owner_trusts(tmp_path, user_code):
    model = {"model": {"name": USER_MODEL, "input_shape": [1, 8, 8], "num_classes": 10}}
    assert "allow it with --trust usermodel" in refusal(enrolment(**model), tmp_path)
    assert "--trust usermodel" in refusal(enrolment(**model), tmp_path, trusted=("user", "usermodel.x"))
    assert joined(enrolment(**model), tmp_path, trusted=("usermodel",)).report.num_samples > 1000


@pytest.mark.parametrize(("num_training", "num_lines"), [(1, 1), (2, 0)])
def test_a_device_that_trains_on_a_single_sample_says_so(
    tmp_path, user_code, caplog, num_training, num_lines
):
    rows = num_training + 2
    test = np.arange(rows) >= num_training
    np.savez(tmp_path / "few.npz", x=np.ones((rows, 1, 8, 8), np.float32), y=np.arange(rows), test=test)
    enrolled = enrolment(model={"name": "usermodel:normed", "input_shape": [1, 8, 8], "num_classes": 10})
    joined(enrolled, tmp_path, data=f"npz:{tmp_path}/few.npz", trusted=("usermodel",))
    warnings = [one.getMessage() for one in caplog.records if one.levelname == "WARNING"]
    found = [one for one in warnings if one.startswith("d has 1 training sample:")]
    assert len(found) == num_lines
    assert all("running statistics" in one for one in found)


def test_a_method_of_the_coordinators_own_is_not_imported_either(tmp_path):
    enrolled = enrolment()
    foreign = codec.decode(codec.encode(enrolled, enrolled.spec), Enrolment, enrolled.spec)
    foreign.method["name"] = "os:getcwd"
    assert "allow it with --trust os" in refusal(foreign, tmp_path)


def test_an_augmentation_is_imported_where_the_owner_trusts_it_and_tried_before_it_joins(tmp_path, user_code):
    enrolled = enrolment(training={"augment": ["flip", "useraugment:half"]})
    assert "allow it with --trust useraugment" in refusal(enrolled, tmp_path)
    with pytest.raises(SettingError, match="allow it with --trust useraugment"):  # a bundle has nothing of it
        check_trust(enrolled, (), builds_model=False)
    assert joined(enrolled, tmp_path, trusted=("useraugment",)).report.num_samples > 1000
    failing = enrolment(training={"augment": "useraugment:fails"})
    said = refusal(failing, tmp_path, trusted=("useraugment",))
    assert said == "training.augment: 'useraugment:fails' failed: KeyError: 'no'"


@pytest.mark.parametrize(
    ("sections", "settings", "message"),
    [
        ({"model": {"name": "mlp", "input_shape": [1, 8, 8], "num_classes": 5}}, {}, "the model has 0..4"),
        (
            {"model": {"name": "mlp", "input_shape": [1, 9, 9], "num_classes": 10}},
            {},
            "expected (1, 9, 9)",
        ),
        ({}, {"board": "raspberry-pi-9"}, "no board 'raspberry-pi-9'"),
    ],
)
def test_what_does_not_fit_is_refused_with_the_reason(tmp_path, sections, settings, message):
    enrolled = enrolment(**sections)
    assert message in refusal(enrolled, tmp_path, **settings)


def test_a_coordinator_without_the_models_shape_says_what_to_write():
    with pytest.raises(FleetuneError, match=r"model.input_shape and model.num_classes are missing"):
        enrolment(model={"name": "mlp"})


def test_a_session_of_another_version_is_not_called_damaged(tmp_path):
    enrolled, store = enrolment(), AgentStore(tmp_path)
    memory = store.session(enrolled.run)
    memory.write(b"FLTN\x07" + bytes(40))
    with pytest.raises(StoreVersion):
        joined(enrolled, tmp_path)
    memory.write(b"FLTN\x01" + bytes(40))
    assert "session is damaged" in refusal(enrolled, tmp_path)
