"""What is frozen in models, on a device: kept under its digest, checked, gone when nothing uses it."""

import os

from fleetune.edge_agent.run.intake import Intake
from fleetune.edge_agent.state.agent_store import RUNS_WITH_BACKBONES, AgentStore
from fleetune.protocols.wire.messages import Offer, Refuse, Resume, TransferKey
from fleetune.protocols.wire.transfer import digest_of, transfer_id


def kept(store):
    return {path.name for path in (store.folder / "backbones").iterdir()}


def begin(store, number, content):
    """A run with this backbone, later than those before it."""
    store.want_backbone(f"r-{number}", digest_of(content))
    os.utime(store.folder / "runs" / f"r-{number}", (number, number))


def test_a_backbone_serves_many_runs_and_goes_when_the_latest_use_another(tmp_path):
    store = AgentStore(tmp_path)
    begin(store, 1, b"one")
    store.keep_backbone(b"one")
    assert bytes(store.backbone(digest_of(b"one"))) == b"one"
    for number in range(2, 2 + RUNS_WITH_BACKBONES):
        begin(store, number, b"two")
    store.keep_backbone(b"two", used_by=["r-1"])
    assert kept(store) == {digest_of(b"one"), digest_of(b"two")}
    store.keep_backbone(b"two")
    assert kept(store) == {digest_of(b"two")}
    assert store.backbone(digest_of(b"one")) is None


def test_a_damaged_one_is_as_none(tmp_path):
    store = AgentStore(tmp_path)
    store.keep_backbone(b"one")
    (path,) = (tmp_path / "backbones").iterdir()
    path.write_bytes(path.read_bytes()[:-1] + b"!")
    assert store.backbone(digest_of(b"one")) is None


def test_no_backbone_is_taken_but_the_one_that_was_asked_for(tmp_path):
    store = AgentStore(tmp_path)
    intake = Intake("d", store, joined=lambda: None, reason_not_to_train=lambda: None, clock=lambda: 0.0)

    def offered(content):
        key = TransferKey("backbone", "r-1")
        digest = digest_of(content)
        return intake.handle_offer(Offer(transfer_id(key, "d", digest), digest, len(content), key))

    assert isinstance(offered(b"one"), Refuse)
    begin(store, 1, b"two")
    assert isinstance(offered(b"one"), Refuse)
    assert isinstance(offered(b"two"), Resume)
