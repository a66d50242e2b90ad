"""Vectors of the exchange by which a device joins: the product and a decoder without it find the same.

`python -m tests.wire.test_join_vectors` writes tests/wire/join.json anew.
"""

import json
import ssl
import tempfile
from pathlib import Path

import msgspec
import pytest
from tests.coordinator.fleet.test_joining import NONCE, NOW, Desk, key
from tests.wire import join_decoder

from fleetune.coordinator.fleet.authority import device_key
from fleetune.coordinator.fleet.fleet_folder import FleetFolder
from fleetune.coordinator.fleet.joining import JoinError
from fleetune.protocols.errors import SettingError
from fleetune.protocols.wire.join_exchange import (
    CODE_LENGTH,
    FINGERPRINT_LENGTH,
    Joined,
    JoinLine,
    JoinPending,
    JoinRefused,
    JoinRequest,
    fingerprint_of,
)

PATH = Path(__file__).parent / "join.json"
VECTORS = json.loads(PATH.read_text()) if PATH.exists() else {"lines": [], "exchanges": []}
CODE, FINGERPRINT = "a2" * (CODE_LENGTH // 2), "b7" * (FINGERPRINT_LENGTH // 2)
TYPES = {200: Joined, 202: JoinPending}
LINES = (
    f"fleetune://192.168.1.5:8885/lab/{CODE}/{FINGERPRINT}",
    f"fleetune://[2001:db8::1]:8885/lab/{CODE}/{FINGERPRINT}\n",
    f"fleetune://pi.local:65536/lab/{CODE}/{FINGERPRINT}",
    f"fleetune://pi.local:8885/lab/{CODE[1:]}/{FINGERPRINT}",
    f"https://pi.local:8885/lab/{CODE}/{FINGERPRINT}",
)


@pytest.mark.parametrize("vector", VECTORS["lines"], ids=lambda one: one["line"][11:25])
def test_both_read_the_same_invitations(vector):
    assert join_decoder.invitation(vector["line"]) == vector["parts"]
    assert parts(vector["line"]) == vector["parts"]


@pytest.mark.parametrize("vector", VECTORS["exchanges"], ids=lambda one: one["about"])
def test_both_read_the_same_answers(vector):
    assert join_decoder.answer(vector["status"], vector["answer"]) == vector["found"]
    answer = msgspec.json.decode(vector["answer"], type=TYPES.get(vector["status"], JoinRefused))
    assert msgspec.json.encode(answer).decode() == vector["answer"]
    assert (
        msgspec.json.encode(msgspec.json.decode(vector["request"], type=JoinRequest)).decode()
        == vector["request"]
    )


def test_both_find_the_same_fingerprint_and_keys():
    (vector,) = (one for one in VECTORS["exchanges"] if one["about"] == "certificate")
    (pem,) = join_decoder.certificates(json.loads(vector["answer"])["authority"])
    assert (
        join_decoder.fingerprint(pem)
        == fingerprint_of(ssl.PEM_cert_to_DER_cert(pem))
        == vector["fingerprint"]
    )
    request = json.loads(vector["request"])["signing_request"]
    known = device_key(request).sha256
    assert join_decoder.key_of_request(request) == known
    device = vector["found"]["device"]
    assert vector["found"]["certificates"] == [[device, known], [f"{device}~probe", known]]


def test_the_decoder_shares_nothing_with_the_product():
    source = Path(join_decoder.__file__).read_text()
    assert "fleetune." not in source
    assert "msgspec" not in source


def parts(line):
    """The parts of an invitation that the product finds; None if it finds none."""
    try:
        return msgspec.structs.asdict(JoinLine.parse(line))
    except SettingError:
        return None


def exchange(desk, about, code, **request):
    """One request and its answer."""
    made = JoinRequest("lab", code, **request)
    try:
        answer = desk.join(code, **request)
        status = 202 if isinstance(answer, JoinPending) else 200
    except JoinError as problem:
        answer, status = JoinRefused(str(problem)), 403
    body = msgspec.json.encode(answer).decode()
    return {
        "about": about,
        "request": msgspec.json.encode(made).decode(),
        "status": status,
        "answer": body,
        "fingerprint": desk.authority.fingerprint,
        "found": join_decoder.answer(status, body),
    }


def exchanges(desk):
    """All exchanges anew."""
    code = desk.code(devices=2)
    yield exchange(desk, "certificate", code, signing_request=key(), name="Küche", agent="fleetune 1")
    yield exchange(desk, "secret", code, nonce=NONCE, device="panel")
    yield exchange(desk, "pending", desk.code(approve=True), signing_request=key(), device="pi-2")
    yield exchange(desk, "refused", code, signing_request=key())


def write() -> None:
    """All vectors anew."""
    with tempfile.TemporaryDirectory() as folder:
        desk = Desk(FleetFolder.of("lab", Path(folder)))
        found = {
            "about": f"joining a fleet, at {NOW:.0f} s since 1970 (docs/wire.md, Joining a fleet)",
            "lines": [{"line": one, "parts": join_decoder.invitation(one)} for one in LINES],
            "exchanges": list(exchanges(desk)),
        }
        desk.registry.close()
    PATH.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    write()
