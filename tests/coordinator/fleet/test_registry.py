"""The registry of a fleet's devices and invitations, which several processes write."""

import sqlite3
import stat

import pytest
from msgspec.structs import replace

from fleetune.coordinator.fleet.registry import RegisteredDevice, Registry, StoredInvitation
from fleetune.protocols.errors import SettingError, StoreError

NOW = 1e9


def device(of="pi-1", **changes):
    made = RegisteredDevice(
        of,
        of,
        False,
        "certificate",
        "accepted",
        ("hall",),
        f"key of {of}",
        "",
        None,
        "",
        "",
        NOW,
        None,
        "",
    )
    return replace(made, **changes)


def invitation(name="abc", **changes):
    return replace(StoredInvitation(name, f"code of {name}", 2, 2, NOW, NOW + 60, ("hall",)), **changes)


@pytest.fixture
def registry(tmp_path):
    with Registry.open(tmp_path / "lab" / "registry.sqlite") as opened:
        yield opened


def test_it_stores_devices(registry):
    for one in (device("pi-2", name="hall"), device()):
        registry.put(one)
    assert registry.devices() == [device(), device("pi-2", name="hall")]
    assert registry.find("hall") == registry.device("pi-2") == registry.device_with_key("key of pi-2")
    registry.put(device("pi-3", name="hall"))
    with pytest.raises(SettingError, match="several devices are called 'hall'; use an id: pi-2, pi-3"):
        registry.find("hall")
    with pytest.raises(SettingError, match="no device 'pi-4' in fleet lab; did you mean"):
        registry.find("pi-4")


def test_no_other_device_takes_over_a_name_that_an_operator_gave(registry):
    for one in (device("alpha"), device("kitchen")):
        registry.put(one)
    with pytest.raises(SettingError, match="another device has the id 'kitchen'"):
        registry.rename("alpha", "kitchen")
    registry.put(device("alpha", name="kitchen", renamed=True))  # by an earlier version
    with pytest.raises(SettingError, match="is the name of device alpha, and the id of another"):
        registry.find("kitchen")
    registry.put(device("alpha", name="kitchen"))  # a device cannot block an id by its own name
    assert registry.find("kitchen").id == "kitchen"
    registry.rename("kitchen", "kitchen")


def test_one_key_is_one_device(registry):
    registry.put(device())
    with pytest.raises(StoreError, match="UNIQUE"):
        registry.put(device("pi-2", key="key of pi-1"))
    assert [one.id for one in registry.devices()] == ["pi-1"]


def test_an_operators_name_stays(registry):
    registry.put(device())
    registry.note_seen({"pi-1": (NOW + 5, "fleetune 1", "its own name")})
    assert registry.device("pi-1") == device(name="its own name", last_seen=NOW + 5, agent="fleetune 1")
    registry.rename("pi-1", "kitchen")
    registry.note_seen({"pi-1": (NOW + 6, "fleetune 1", "its own name"), "unknown": (NOW, "", "")})
    assert registry.device("pi-1").name == "kitchen"
    with pytest.raises(SettingError, match="invalid"):
        registry.rename("pi-1", "a\nb")


def test_revoked_and_forgotten_devices_certificates_stay_revoked_until_they_end(registry):
    for number in range(3):
        registry.put(device(f"pi-{number}"))
        registry.note_certificates(
            f"pi-{number}", ("own", "probe"), (f"{number}a", f"{number}b"), ends_at=NOW + 9, authority="one"
        )
    assert registry.certificates("pi-1") == ("own", "probe")
    assert registry.device("pi-1").ends_at == NOW + 9
    registry.revoke("pi-1")
    registry.forget("pi-2")
    assert registry.revoked_serials(NOW) == ["1a", "1b", "2a", "2b"]
    assert registry.device("pi-2") is registry.certificates("pi-2") is None
    registry.accept("pi-1")
    assert registry.revoked_serials(NOW) == ["2a", "2b"]
    assert registry.revoked_serials(NOW + 10) == []


def test_only_accepted_devices_secrets_are_listed(registry):
    for number, state in enumerate(("accepted", "pending", "revoked")):
        registry.put(device(f"pi-{number}", kind="secret", state=state))
        registry.note_secret(f"pi-{number}", "$7$hash", ends_at=NOW + 9)
    assert registry.secrets(NOW) == [("pi-0", "$7$hash")]
    assert registry.secrets(NOW + 9) == []


def test_it_counts_the_uses_of_an_invitation(registry):
    registry.put_invitation(invitation())
    registry.note_joining("abc", "key", "pi-1", NOW)
    found = registry.invitation("code of abc")
    assert found == invitation(uses_left=1)
    assert registry.joined_with("abc", "key") == "pi-1"
    assert registry.devices_of("abc") == ["pi-1"]
    opens = [one.is_open(NOW) for one in (found, replace(found, uses_left=0), replace(found, withdrawn=True))]
    assert opens == [True, False, False]
    assert not found.is_open(NOW + 60)
    registry.drop_invitations(NOW + 60)
    assert registry.invitations() == [found]
    registry.drop_invitations(NOW + 61)
    assert registry.invitations() == registry.devices_of("abc") == []


def test_a_step_is_stored_as_a_whole_or_not(registry):
    def half_a_step():
        with registry.step():
            registry.put(device())
            registry.put_invitation(invitation())
            raise ValueError("stop")

    with pytest.raises(ValueError, match="stop"):
        half_a_step()
    assert registry.devices() == registry.invitations() == []


def test_each_change_of_any_process_raises_the_version(registry):
    before = registry.version
    with Registry.open(registry.path) as other:
        other.put(device())
        assert registry.version > before
        before = registry.version
        other.note_seen({"pi-1": (NOW, "", "")})
        assert registry.version == before
        other.revoke("pi-1")
    assert registry.version > before


def test_its_files_are_private(registry):
    registry.put(device())
    for path in registry.path.parent.iterdir():
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(registry.path.parent.stat().st_mode) == 0o700


def test_a_file_that_is_no_registry_gets_one_line(tmp_path):
    (tmp_path / "registry.sqlite").write_text("nothing " * 200)
    with pytest.raises(StoreError, match="registry\\.sqlite: file is not a database"):
        Registry.open(tmp_path / "registry.sqlite")


def test_a_lookup_among_ten_thousand_devices_reads_few_of_them(registry):
    with registry.step():
        for number in range(10_000):
            registry.put(device(f"pi-{number}"))
    assert len(registry.devices()) == 10_000
    plans = sqlite3.connect(registry.path)
    for column in ("id", "key", "name"):
        (plan,) = plans.execute(f"EXPLAIN QUERY PLAN SELECT * FROM device WHERE {column} = 'x'").fetchall()
        assert "USING INDEX" in plan[3]
    plans.close()
