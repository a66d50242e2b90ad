"""Requests to join: who gets in, who does not, and what stays when answers are lost."""

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from fleetune.coordinator.fleet.access_files import write_access_files
from fleetune.coordinator.fleet.authority import DAY_S, Authority
from fleetune.coordinator.fleet.fleet_address import FleetAddress
from fleetune.coordinator.fleet.fleet_folder import FleetFolder
from fleetune.coordinator.fleet.invitations import invite, withdraw
from fleetune.coordinator.fleet.joining import JoinError, join
from fleetune.coordinator.fleet.registry import Registry
from fleetune.coordinator.fleet.secret_hash import is_hash_of
from fleetune.protocols.errors import SettingError
from fleetune.protocols.wire.join_exchange import Joined, JoinPending, JoinRequest

NOW = 1.8e9
ADDRESS = FleetAddress(("pi.local",), 8883, 8884, 8885)
NONCE = "0123456789abcdef"


class Desk:
    """A fleet's registry and authority, and the requests of devices."""

    def __init__(self, folder):
        self.folder, self.registry = folder, Registry.open(folder.registry)
        self.authority, self.now = Authority.open(folder, NOW), NOW

    def code(self, **options):
        return invite(self.registry, self.now, **options)[1]

    def join(self, code, key=None, **request):
        made = JoinRequest(
            **{"fleet": "lab", "code": code, "signing_request": "" if key is None else key, **request}
        )
        return join(self.registry, self.authority, ADDRESS, made, self.now)

    def refusal(self, *arguments, **request):
        before = dump(self.registry)
        with pytest.raises(JoinError) as problem:
            self.join(*arguments, **request)
        assert dump(self.registry) == before
        assert "\n" not in str(problem.value)
        assert "; " in str(problem.value)
        return problem.value.cause


def dump(registry):
    return list(registry._connection.iterdump())


@pytest.fixture
def desk(tmp_path):
    made = Desk(FleetFolder.of("lab", tmp_path))
    yield made
    made.registry.close()


def key():
    """A signing request with a new key."""
    made = x509.CertificateSigningRequestBuilder().subject_name(x509.Name([]))
    signed = made.sign(ec.generate_private_key(ec.SECP256R1()), hashes.SHA256())
    return signed.public_bytes(serialization.Encoding.PEM).decode()


def test_a_device_joins_once_however_often_it_asks(desk):
    code, request = desk.code(tags=("hall",)), key()
    joined = desk.join(code, request, name="Küche")
    assert (joined.device, joined.name, joined.port) == ("K-che", "Küche", 8883)
    assert joined.authority == desk.authority.bundle
    before = dump(desk.registry)
    desk.now += 3600  # the invitation has expired, and the answer was lost
    again = desk.join(code, request)
    assert (again.certificate, again.probe_certificate) == (joined.certificate, joined.probe_certificate)
    assert dump(desk.registry) == before
    (one,) = desk.registry.devices()
    assert (one.kind, one.state, one.tags) == ("certificate", "accepted", ("hall",))
    assert one.bundle == desk.authority.bundle_id


def test_codes_that_do_not_hold_are_refused_and_nothing_is_lost(desk):
    code = desk.code()
    first = desk.join(code, key(), name="pi")
    assert desk.refusal(code, key()) == "used"
    assert desk.refusal("a" * 20, key()) == "code"
    assert desk.refusal(desk.code(), key(), fleet="other") == "fleet"
    made, code = invite(desk.registry, desk.now)
    withdraw(desk.registry, made.id)
    assert desk.refusal(code, key()) == "withdrawn"
    code = desk.code(expires_s=60)
    desk.now += 60
    assert desk.refusal(code, key()) == "expired"
    assert [one.id for one in desk.registry.devices()] == [first.device]


def test_a_code_for_several_devices_counts_them(desk):
    code = desk.code(devices=2)
    same = key()
    ids = [desk.join(code, one, name="pi").device for one in (same, same, key())]
    assert ids[0] == ids[1] == "pi"
    assert ids[2].startswith("pi-")
    assert desk.refusal(code, key()) == "used"


def test_a_taken_or_reserved_id_is_refused(desk):
    code = desk.code(devices=9)
    assert desk.join(code, key(), device="pi").device == "pi"
    assert desk.refusal(code, key(), device="pi") == "taken"
    assert desk.refusal(code, key(), device="coordinator") == "id"
    assert desk.refusal(code, key(), device="x" * 59) == "id"
    assert desk.refusal(code, key(), device="--help") == "id"
    desk.registry.rename("pi", "Kitchen")
    assert desk.refusal(code, key(), device="Kitchen") == "taken"
    assert desk.join(code, key(), name="Kitchen").device.startswith("Kitchen-")
    assert desk.join(code, key(), device="x" * 58).device == "x" * 58
    assert desk.join(code, key(), name="coordinator").device.startswith("coordinator-")
    assert desk.join(code, key(), name="x" * 64).device == "x" * 41
    assert desk.join(code, key(), name="\n\t ").device.startswith("device-")


def test_a_revoked_device_does_not_return_before_it_is_approved(desk):
    code, request = desk.code(), key()
    joined = desk.join(code, request)
    desk.registry.revoke(joined.device)
    assert desk.refusal(code, request) == desk.refusal(desk.code(), request) == "revoked"
    desk.registry.accept(joined.device)
    assert desk.join(code, request).certificate == joined.certificate


def test_a_device_waits_for_approval(desk):
    code, request = desk.code(approve=True), key()
    waiting = desk.join(code, request)
    assert waiting == desk.join(code, request) == JoinPending(waiting.device, 10.0)
    assert desk.registry.certificates(waiting.device) is None
    desk.registry.accept(waiting.device)
    desk.now += 1e6
    assert isinstance(desk.join(code, request), Joined)


def test_an_expired_device_joins_again_with_a_new_line_and_keeps_its_id(desk):
    code, request = desk.code(), key()
    joined = desk.join(code, request)
    desk.now += 366 * DAY_S
    assert desk.refusal(code, request) == "ended"
    again = desk.join(desk.code(), request, name="another")
    assert again.device == joined.device
    assert again.certificate != joined.certificate


def test_after_a_change_of_authority_a_repeated_request_gets_new_certificates(desk):
    code, request = desk.code(), key()
    joined = desk.join(code, request)
    desk.authority.rotate(desk.now)
    assert desk.join(code, request).certificate == joined.certificate  # the old authority is still trusted
    desk.authority.drop_old()
    assert desk.join(code, request).certificate != joined.certificate


def test_a_device_without_certificate_gets_a_secret_of_its_own(desk):
    code = desk.code(devices=3)
    joined = desk.join(code, nonce=NONCE, device="panel")
    assert (joined.port, joined.certificate) == (8884, "")
    again = desk.join(code, nonce=NONCE)  # the answer was lost
    assert again.device == "panel"
    assert again.secret != joined.secret
    assert is_hash_of(again.secret, desk.registry.device("panel").secret)
    assert desk.refusal(code, nonce="1123456789abcdef", device="panel") == "taken"
    assert desk.refusal(code, key(), device="panel") == "taken"  # never both
    assert desk.refusal(code, nonce="short") == desk.refusal(code) == "request"
    desk.registry.note_seen({"panel": (desk.now, "", "")})
    assert desk.refusal(code, nonce=NONCE) == "connected"
    write_access_files(desk.authority, desk.registry, desk.now)
    users = [line.partition(":")[0] for line in desk.folder.passwords.read_text().splitlines()]
    assert users == ["panel", "panel~probe"]
    desk.now += 366 * DAY_S
    assert write_access_files(desk.authority, desk.registry, desk.now)
    assert desk.folder.passwords.read_bytes() == b""
    assert desk.join(desk.code(), nonce=NONCE).device == "panel"


def test_a_hostile_signing_request_is_refused(desk):
    assert desk.refusal(desk.code(), "-----BEGIN CERTIFICATE REQUEST-----") == "request"


def test_access_files_are_written_only_when_they_change(desk):
    def write():
        return write_access_files(desk.authority, desk.registry, desk.now)

    assert [write(), write()] == [True, False]
    joined = desk.join(desk.code(), key())
    assert not write()
    desk.registry.revoke(joined.device)
    assert [write(), write()] == [True, False]
    found = x509.load_pem_x509_crl(desk.folder.revoked.read_bytes())
    number = x509.load_pem_x509_certificate(joined.certificate.encode()).serial_number
    assert found.get_revoked_certificate_by_serial_number(number) is not None
    assert len(found) == 2
    desk.registry.forget(joined.device)
    assert not write()
    desk.authority.rotate(desk.now)
    assert write()
    assert desk.folder.revoked.read_text().count("BEGIN X509 CRL") == 2


def test_no_secret_is_stored_as_such(desk, tmp_path):
    code = desk.code(devices=2)
    joined = desk.join(code, nonce=NONCE)
    write_access_files(desk.authority, desk.registry, desk.now)
    for path in tmp_path.rglob("*"):
        if path.is_file():
            for secret in (code, joined.secret, NONCE):
                assert secret.encode() not in path.read_bytes(), path


def test_tags_and_names_of_invitations_are_checked(desk):
    with pytest.raises(SettingError, match="--tag 'a\\\\n' is invalid; use at most 10 tags"):
        desk.code(tags=("a\n",))
    with pytest.raises(SettingError, match="11 tags are too many"):
        desk.code(tags=("a",) * 11)
    with pytest.raises(SettingError, match="no invitation 'x' in fleet lab; there are none"):
        withdraw(desk.registry, "x")


def test_ended_invitations_are_dropped_after_a_month(desk):
    desk.join(desk.code(), key())
    desk.now += 31 * DAY_S
    desk.code()
    assert len(desk.registry.invitations()) == 1
