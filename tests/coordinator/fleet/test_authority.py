"""The authority of a fleet: its certificates are accepted and refused by OpenSSL as they should be."""

import socket
import ssl
import stat
import threading
import time
from dataclasses import dataclass

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.x509.oid import NameOID
from tests.helpers.registered_fleet import RegisteredFleet

from fleetune.coordinator.fleet.authority import DAY_S, Authority, device_key, is_due
from fleetune.coordinator.fleet.fleet_folder import FleetFolder
from fleetune.protocols.errors import PacketCorrupt, StoreError

NOW = time.time()


@pytest.fixture
def folder(tmp_path):
    return FleetFolder.of("lab", tmp_path)


@pytest.fixture
def authority(folder):
    made = Authority.open(folder, NOW)
    made.renew_server(["pi.local", "192.168.1.5", "::1"], NOW)
    return made


@dataclass
class Device:
    """A device's key and certificates on disk, and the authorities that it trusts."""

    key: ec.EllipticCurvePrivateKey
    folder: object
    bundle: str

    @classmethod
    def joined(cls, authority, folder, now=NOW):
        key = ec.generate_private_key(ec.SECP256R1())
        made = authority.certify(device_key(request(key)), "pi-1", now)
        folder.mkdir(exist_ok=True)
        (folder / "device.pem").write_text(made.certificate)
        (folder / "device.key").write_bytes(pem(key))
        return cls(key, folder, authority.bundle)

    def context(self):
        made = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        made.check_hostname = False
        made.load_verify_locations(cadata=self.bundle)
        made.load_cert_chain(self.folder / "device.pem", self.folder / "device.key")
        return made


def pem(key):
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def request(key, name="*.example", extensions=(), algorithm=None):
    builder = x509.CertificateSigningRequestBuilder().subject_name(
        x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    )
    for one in extensions:
        builder = builder.add_extension(one, critical=True)
    made = builder.sign(key, algorithm or hashes.SHA256())
    return made.public_bytes(serialization.Encoding.PEM).decode()


def meeting(folder, client_context):
    """The common name that a server sees, or the error of the side that refuses."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_cert_chain(folder.server, folder.server_key)
    context.load_verify_locations(folder.authority)
    if folder.revoked.exists():
        context.load_verify_locations(folder.revoked)
        context.verify_flags |= ssl.VERIFY_CRL_CHECK_LEAF
    one, other = socket.socketpair()
    found = []

    def serve():
        try:
            with context.wrap_socket(one, server_side=True) as server:
                found.append(dict(pair for (pair,) in server.getpeercert()["subject"])["commonName"])
                server.sendall(b"x")
        except OSError as problem:
            found.append(str(problem))

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        with client_context.wrap_socket(other) as client:
            client.recv(1)
    except OSError as problem:
        thread.join()
        return f"{problem} | {found[0]}"
    thread.join()
    return found[0]


def test_files_are_private_and_made_once(folder):
    one = Authority.open(folder, NOW)
    before = one.bundle, one.fingerprint
    other = Authority.open(folder, NOW + 5)
    assert (other.bundle, other.fingerprint) == before
    other.renew_server(["localhost"], NOW)
    for path in (folder.authority_key, folder.authority, folder.server_key, folder.server):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(folder.path.stat().st_mode) == 0o700


def test_a_key_without_certificate_gets_one(folder):
    Authority.open(folder, NOW)
    key = folder.authority_key.read_bytes()
    folder.authority.unlink()  # a crash between the two files
    Authority.open(folder, NOW)
    assert folder.authority_key.read_bytes() == key


def test_a_joined_device_and_the_server_accept_each_other(authority, folder, tmp_path):
    assert meeting(folder, Device.joined(authority, tmp_path / "d").context()) == "pi-1"


def test_the_strict_checks_of_newer_pythons_pass(authority, folder, tmp_path):
    context = Device.joined(authority, tmp_path / "d").context()
    context.verify_flags |= ssl.VERIFY_X509_STRICT
    context.check_hostname = True
    server = ssl.create_default_context(cadata=authority.bundle)
    assert server.verify_mode == ssl.CERT_REQUIRED
    context.check_hostname = False
    assert meeting(folder, context) == "pi-1"


def test_foreign_expired_and_revoked_devices_are_refused(authority, folder, tmp_path, monkeypatch):
    foreign = Authority.open(FleetFolder.of("other", tmp_path), NOW)
    stranger = Device.joined(foreign, tmp_path / "s")
    stranger.bundle = authority.bundle
    assert "unknown ca" in meeting(folder, stranger.context()).lower()
    with monkeypatch.context() as patched:
        patched.setattr("fleetune.coordinator.fleet.authority.DEVICE_DAYS", -1)
        late = Device.joined(authority, tmp_path / "l")
    assert "expired" in meeting(folder, late.context())
    good, bad = (Device.joined(authority, tmp_path / name) for name in "gb")
    serial = x509.load_pem_x509_certificate((bad.folder / "device.pem").read_bytes()).serial_number
    folder.revoked.write_bytes(authority.revocation_list([f"{serial:x}"], NOW))
    assert "revoked" in meeting(folder, bad.context())
    assert meeting(folder, good.context()) == "pi-1"


def test_a_device_is_no_server(authority, folder, tmp_path):
    one, other = (Device.joined(authority, tmp_path / name) for name in "ab")
    folder.server.write_bytes((other.folder / "device.pem").read_bytes())
    folder.server_key.write_bytes((other.folder / "device.key").read_bytes())
    assert "unsuitable certificate purpose" in meeting(folder, one.context())


def test_the_server_certificate_is_renewed_when_needed_only(authority, folder):
    first = folder.server.read_bytes()
    assert not authority.renew_server(["192.168.1.5"], NOW + 59 * DAY_S)
    assert folder.server.read_bytes() == first
    assert authority.renew_server(["192.168.1.5", "192.168.1.6"], NOW)
    assert authority.renew_server(["192.168.1.5"], NOW + 61 * DAY_S)
    folder.server_key.unlink()  # a key that does not fit any more
    assert authority.renew_server(["192.168.1.5"], NOW + 61 * DAY_S)
    names = x509.load_pem_x509_certificate(folder.server.read_bytes()).extensions
    found = names.get_extension_for_class(x509.SubjectAlternativeName).value
    assert [str(one) for one in found.get_values_for_type(x509.IPAddress)] == ["192.168.1.5"]


def test_names_that_no_certificate_can_have_are_left_out(authority, folder):
    authority.renew_server(["a b", "x" * 300, "é", "", "*", "kitchen"], NOW + 61 * DAY_S)
    names = x509.load_pem_x509_certificate(folder.server.read_bytes()).extensions
    found = names.get_extension_for_class(x509.SubjectAlternativeName).value
    assert found.get_values_for_type(x509.DNSName) == ["kitchen"]


def test_a_new_authority_costs_no_device_its_connection(authority, folder, tmp_path):
    before = Device.joined(authority, tmp_path / "before")
    old = authority.fingerprint
    authority.rotate(NOW)
    assert meeting(folder, before.context()) == "pi-1"  # the server's certificate is still the old one
    assert authority.renew_server(["pi.local"], NOW)
    after = Device.joined(authority, tmp_path / "after")
    assert authority.fingerprints[1:] == [old]
    folder.revoked.write_bytes(authority.revocation_list(["abc"], NOW))
    assert meeting(folder, before.context()) == "pi-1"
    assert meeting(folder, after.context()) == "pi-1"
    authority.drop_old()
    folder.revoked.unlink()
    assert authority.fingerprints == [authority.fingerprint]
    after.bundle = authority.bundle
    assert meeting(folder, after.context()) == "pi-1"
    assert "unknown ca" in meeting(folder, before.context()).lower()  # it trusts the server, not the reverse
    assert authority.renew_server(["elsewhere"], NOW)
    after.bundle = before.bundle  # a device with a secret, which has the old bundle for ever
    assert meeting(folder, after.context()) == "pi-1"
    assert folder.authority_key.read_text().count("BEGIN") == 1


def test_a_stolen_authority_is_replaced_at_once(authority, folder, tmp_path):
    before, key = Device.joined(authority, tmp_path / "before"), folder.server_key.read_bytes()
    authority.rotate(NOW, at_once=True)
    authority.renew_server(["pi.local"], NOW)
    assert "certificate verify failed" in meeting(folder, before.context())
    assert folder.server_key.read_bytes() != key
    assert folder.authority_key.read_text().count("BEGIN") == 1


@pytest.mark.parametrize(
    "then", [0.0, NOW - 20 * 365 * DAY_S, NOW + 10 * DAY_S], ids=["1970", "behind", "ahead"]
)
def test_a_wrong_clock_at_the_first_start_locks_no_device_out(folder, tmp_path, then):
    authority = Authority.open(folder, then)
    authority.renew_server(["pi.local"], then)
    device = Device.joined(authority, tmp_path / "d", then)
    folder.revoked.write_bytes(authority.revocation_list(["abc"], then))
    if then < NOW:
        assert meeting(folder, device.context()) == "pi-1"  # with a right clock on the device
    assert not authority.renew_server(["pi.local"], then + 1)
    assert authority.renew_server(["pi.local"], NOW)  # as the join server does once the clock is set
    assert not authority.rotate_before_end(NOW)
    assert meeting(folder, device.context()) == "pi-1"


def test_an_authority_is_replaced_before_its_end_but_not_after_it(authority, folder, tmp_path):
    before = Device.joined(authority, tmp_path / "d", at := NOW + 7.9 * 365 * DAY_S)
    assert not authority.rotate_before_end(at)
    ended = NOW + 10 * 365 * DAY_S + 1
    assert not authority.rotate_before_end(ended)  # the clock may be wrong
    for sign in (lambda: authority.renew_server(["pi.local"], ended), lambda: joined_at(authority, ended)):
        with pytest.raises(
            StoreError, match=r"^the authority of fleet lab is valid .*; set the clock\. [^\n]*$"
        ):
            sign()
    assert authority.rotate_before_end(NOW + 8.1 * 365 * DAY_S)
    assert not authority.rotate_before_end(NOW + 8.1 * 365 * DAY_S)
    assert authority.renew_server(["pi.local"], NOW)
    assert meeting(folder, before.context()) == "pi-1"


def joined_at(authority, now):
    return authority.certify(device_key(request(ec.generate_private_key(ec.SECP256R1()))), "pi-1", now)


def test_an_ended_authority_can_be_replaced(authority, folder, tmp_path):
    ended = NOW + 10 * 365 * DAY_S + 1
    for at_once in (False, True):
        authority.rotate(ended, at_once=at_once)
        assert authority.renew_server(["pi.local"], ended)
        authority.revocation_list([], ended)


@pytest.mark.parametrize("file", ["server", "server_key"])
@pytest.mark.parametrize("damage", ["missing", "empty", "cut", "cut-chain"])
def test_files_of_the_server_are_made_anew(authority, folder, tmp_path, file, damage):
    authority.rotate(NOW)
    authority.renew_server(["pi.local"], NOW)
    device, path = Device.joined(authority, tmp_path / "d"), getattr(folder, file)
    whole = path.read_bytes()
    parts = {"empty": b"", "cut": whole[:100], "cut-chain": whole[:-40]}
    if damage == "missing":
        path.unlink()
    else:
        path.write_bytes(parts[damage])
    assert authority.renew_server(["pi.local"], NOW)
    assert not authority.renew_server(["pi.local"], NOW)
    assert meeting(folder, device.context()) == "pi-1"


def test_a_lost_authority_is_not_replaced_if_devices_have_joined(tmp_path):
    fleet = RegisteredFleet(tmp_path)
    for file in (fleet.files.authority, fleet.files.authority_key):
        file.unlink()
    Authority.open(fleet.files, NOW)
    fleet.register("hall")
    for file in (fleet.files.authority, fleet.files.authority_key):
        file.unlink()
    with pytest.raises(StoreError, match=r"authority.key: it is missing, but 1 devices have joined; restore"):
        Authority.open(fleet.files, NOW)
    assert not fleet.files.authority_key.exists()


@pytest.mark.parametrize("damage", [None, 0, 10, -10])
def test_a_revocation_list_is_made_anew_if_it_is_damaged_only(tmp_path, damage):
    fleet = RegisteredFleet(tmp_path)
    before = fleet.files.revoked.read_bytes()
    fleet.write_access()
    assert fleet.files.revoked.read_bytes() == before
    fleet.files.revoked.unlink()
    if damage is not None:
        fleet.files.revoked.write_bytes(before[:damage])
    fleet.write_access()
    x509.load_pem_x509_crl(fleet.files.revoked.read_bytes())


def test_an_open_folder_is_closed(authority, folder):
    folder.path.chmod(0o755)
    Authority.open(folder, NOW)
    assert stat.S_IMODE(folder.path.stat().st_mode) == 0o700


def test_only_the_key_of_a_signing_request_is_used(authority):
    key = ec.generate_private_key(ec.SECP256R1())
    names = x509.SubjectAlternativeName([x509.DNSName(f"*.{n}.example") for n in range(100)])
    made = authority.certify(
        device_key(request(key, extensions=[x509.BasicConstraints(ca=True, path_length=9), names])),
        "pi-1",
        NOW,
    )
    found = x509.load_pem_x509_certificate(made.certificate.encode())
    assert found.subject.rfc4514_string() == "CN=pi-1"
    assert not found.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    with pytest.raises(x509.ExtensionNotFound):
        found.extensions.get_extension_for_class(x509.SubjectAlternativeName)
    probe = x509.load_pem_x509_certificate(made.probe_certificate.encode())
    assert probe.subject.rfc4514_string() == "CN=pi-1~probe"
    assert made.serials == (f"{found.serial_number:x}", f"{probe.serial_number:x}")


def changed(text):
    lines = text.splitlines()
    lines[-2] = lines[-2][::-1]
    return "\n".join(lines)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "x",
        "-----BEGIN CERTIFICATE REQUEST-----\n" + "A" * 8000 + "\n-----END CERTIFICATE REQUEST-----\n",
        request(rsa.generate_private_key(65537, 1024)),
        request(ec.generate_private_key(ec.SECP384R1())),
        changed(request(ec.generate_private_key(ec.SECP256R1()))),
        pem(ec.generate_private_key(ec.SECP256R1())).decode(),
    ],
    ids=["empty", "no-pem", "no-der", "rsa", "p384", "signature", "key"],
)
def test_hostile_signing_requests_get_one_line(text):
    with pytest.raises(PacketCorrupt, match=r"^the signing request .*; ") as problem:
        device_key(text)
    assert "\n" not in str(problem.value)


def test_the_same_key_is_known_again():
    key = ec.generate_private_key(ec.SECP256R1())
    assert device_key(request(key)).sha256 == device_key(request(key, "other")).sha256


def test_damaged_files_get_one_line(authority, folder):
    folder.authority_key.write_text("-----BEGIN X-----\nnothing\n-----END X-----\n")
    with pytest.raises(StoreError, match=r"cannot use .*authority.key: it is damaged; restore"):
        authority.revocation_list([], NOW)
    folder.authority.write_text("")
    with pytest.raises(StoreError, match=r"authority.pem: it is damaged"):
        authority.fingerprint  # noqa: B018


def test_certificates_are_due_after_two_thirds_of_their_life():
    assert [is_due(0, 90, at) for at in (-1, 0, 59, 60, 100)] == [True, False, False, True, True]
