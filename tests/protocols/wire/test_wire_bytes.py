"""No byte of a control message changes unseen: agents and coordinators of two releases stand in one fleet.

Payloads are held to their bytes by tests/fleet/test_upgrade.py.
"""

import json
from contextlib import ExitStack

import pytest
from tests.fuzz.targets import all_targets
from tests.helpers.places import OLD_STATES

THEN = json.loads((OLD_STATES / "messages-6e33d00.json").read_text())


@pytest.fixture(scope="module")
def packets():
    with ExitStack() as closing:
        return {target.name: target.packets for target in all_targets(closing)}


@pytest.mark.parametrize("side", THEN)
def test_every_message_is_the_one_that_the_release_before_sent(packets, side):
    assert [packet.decode() for packet in packets[side]] == THEN[side]
