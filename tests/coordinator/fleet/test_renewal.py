"""The coordinator's side of a renewal: when it is due, what is signed, and what is refused."""

import time

import pytest
from cryptography import x509
from tests.helpers.own_authority import name_of, new_key
from tests.helpers.registered_fleet import RegisteredFleet

from fleetune.coordinator.fleet.authority import DAY_S, device_key
from fleetune.coordinator.fleet.registry import Registry
from fleetune.coordinator.fleet.renewal import is_renewal_due, renew
from fleetune.edge_agent.joining.signing_request import key_and_request
from fleetune.protocols.errors import PacketError
from fleetune.protocols.wire.messages import Renewed, encode


@pytest.fixture
def fleet(tmp_path):
    found = RegisteredFleet(tmp_path)
    found.with_certificate("pi")
    now, authority = time.time(), found.authority
    with Registry.open(found.files.registry) as registry:
        registry.note_bundle("pi", authority.bundle_id)
    assert not is_due(found, now)
    return found


def device(fleet, name="pi"):
    with Registry.open(fleet.files.registry) as registry:
        return registry.device(name)


def is_due(fleet, now):
    authority = fleet.authority
    return is_renewal_due(device(fleet), authority.fingerprint, authority.bundle_id, now)


def common_name(pem):
    return x509.load_pem_x509_certificate(pem.encode()).subject.rfc4514_string()


def test_it_is_due_after_two_thirds_of_its_life(fleet):
    now = time.time()
    assert not is_due(fleet, now + 242 * DAY_S)
    assert is_due(fleet, now + 244 * DAY_S)


def test_it_is_due_when_the_authority_is_replaced_until_it_is_renewed(fleet):
    now = time.time()
    fleet.authority.rotate(now)
    assert is_due(fleet, now)
    (answer,) = renew(fleet.files, {"pi": key_and_request().request}, now).values()
    assert answer.authority == fleet.authority.bundle
    assert answer.authority.count("BEGIN CERTIFICATE") == 2
    assert not is_due(fleet, now)
    fleet.authority.drop_old()
    assert is_due(fleet, now), "it is to forget the old authority"


def test_no_renewal_is_due_for_a_revoked_device_or_one_with_a_secret(fleet):
    later = time.time() + 300 * DAY_S
    fleet.with_secret("browser")
    known = device(fleet, "browser")
    assert not is_renewal_due(known, "x", "y", later)
    fleet.revoke("pi")
    assert not is_due(fleet, later)


def test_a_request_gets_certificates_for_its_key_and_the_same_ones_again(fleet):
    now, made = time.time() + 250 * DAY_S, key_and_request()
    (answer,) = renew(fleet.files, {"pi": made.request}, now).values()
    assert common_name(answer.certificate) == "CN=pi"
    assert common_name(answer.probe_certificate) == "CN=pi~probe"
    assert device(fleet).key == device_key(made.request).sha256
    assert device(fleet).ends_at > now + 364 * DAY_S
    assert renew(fleet.files, {"pi": made.request}, now + 60) == {"pi": answer}
    assert len(encode(answer)) < 8192


def test_the_subject_of_a_request_is_ignored(fleet):
    from cryptography.hazmat.primitives import hashes, serialization

    hostile = x509.CertificateSigningRequestBuilder().subject_name(name_of("coordinator"))
    hostile = hostile.add_extension(x509.BasicConstraints(True, None), True).sign(new_key(), hashes.SHA256())
    request = hostile.public_bytes(serialization.Encoding.PEM).decode()
    (answer,) = renew(fleet.files, {"pi": request}, time.time()).values()
    assert isinstance(answer, Renewed)
    assert common_name(answer.certificate) == "CN=pi"
    found = x509.load_pem_x509_certificate(answer.certificate.encode())
    assert not any(one.value.ca for one in found.extensions if isinstance(one.value, x509.BasicConstraints))


def test_what_is_refused_says_why_and_the_others_are_answered(fleet):
    fleet.with_certificate("cam")
    fleet.with_secret("browser")
    fleet.with_certificate("old")
    fleet.revoke("old")
    key = key_and_request()
    renew(fleet.files, {"cam": key.request}, time.time())
    wrong = {"pi": key.request, "browser": key_and_request().request, "old": key_and_request().request}
    wrong["nobody"] = key_and_request().request
    answers = renew(fleet.files, {**wrong, "cam": "junk"}, time.time())
    assert all(isinstance(answer, PacketError) for answer in answers.values())
    assert "key of another device" in str(answers["pi"])
    assert "PKCS #10" in str(answers["cam"])
    assert isinstance(renew(fleet.files, {"cam": key.request}, time.time())["cam"], Renewed)
