"""Identity: the stable id, the name for people, and how the coordinator knows the device."""

import msgspec
import pytest
from tests.helpers.errors import raises

from fleetune.protocols.errors import SettingError
from fleetune.protocols.wire.identity import MAX_NAME, Identity, check_display_name


def test_the_id_is_shown_where_the_name_differs():
    assert str(Identity.of("pi-3")) == "pi-3"
    assert str(Identity("pi-3", "Küche", "login")) == "Küche (pi-3)"


def test_it_reads_back():
    who = Identity("pi-3", "Küche", "login")
    assert msgspec.json.decode(msgspec.json.encode(who), type=Identity) == who


@pytest.mark.parametrize("name", ["", " ", "a\nb", "x" * (MAX_NAME + 1), "a\x1b[2J"])
def test_a_name_that_no_screen_can_show_is_refused(name):
    with raises(SettingError, repr(name), "--name"):
        check_display_name(name)


def test_any_printable_name_is_valid():
    assert check_display_name("Küche 2. Stock") == "Küche 2. Stock"
