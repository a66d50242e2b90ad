"""The pages on [privacy]: complete in methods, encodings and in what a device sends beside its update."""

from dataclasses import fields

import pytest
from tests.helpers.places import ROOT

from fleetune.protocols.method.choice import DeviceReport
from fleetune.protocols.methods import REGISTRY
from fleetune.protocols.round_cost import RoundCost
from fleetune.protocols.update import encodings
from fleetune.protocols.wire.messages import Decline
from fleetune.protocols.wire.payloads import Measures, Reply
from fleetune.tools.docs.private_methods import private_methods

PAGE = (ROOT / "docs" / "differential-privacy.md").read_text(encoding="utf-8")
SENT = PAGE.partition("## What is sent beside the update")[2].partition("\n## ")[0]


def sent_fields():
    of_messages = {*RoundCost.__struct_fields__, *Decline.__struct_fields__}
    of_payloads = {one.name for kind in (DeviceReport, Reply, Measures) for one in fields(kind)}
    return of_messages | of_payloads - {"update", "measures"}


@pytest.mark.parametrize("name", sorted(sent_fields() - {"run"}))
def test_everything_that_a_device_sends_with_an_update_is_listed(name):
    assert f"`{name}`" in SENT


def test_every_method_and_encoding_has_a_row_with_its_reason():
    rows = [line.split(" | ") for line in private_methods().splitlines() if line.startswith("| `")]
    assert [row[0].strip("|` ") for row in rows] == [*REGISTRY, *encodings.REGISTRY]
    assert all((allowed == "yes") == (not why.strip("| ")) for _, allowed, why in rows)
