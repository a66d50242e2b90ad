"""The child process that makes a device's key and its signing request.

Only this module of the agent imports `cryptography`, which takes 13 MB. A key in PEM on stdin is used again;
otherwise the key is new. The answer on stdout is a `KeyAndRequest` as JSON.
"""

import sys

import msgspec

from fleetune.edge_agent.joining.signing_request import KeyAndRequest


def main() -> None:
    """Read the key, if there is one, and write key and request."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    given = sys.stdin.buffer.read()
    key = (
        serialization.load_pem_private_key(given, None) if given else ec.generate_private_key(ec.SECP256R1())
    )
    assert isinstance(key, ec.EllipticCurvePrivateKey)
    # without a subject, because the coordinator chooses it
    request = x509.CertificateSigningRequestBuilder().subject_name(x509.Name([])).sign(key, hashes.SHA256())
    plain = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    made = KeyAndRequest(plain.decode(), request.public_bytes(serialization.Encoding.PEM).decode())
    sys.stdout.buffer.write(msgspec.json.encode(made))


if __name__ == "__main__":
    main()
