"""A mosquitto with settings of a test."""

import os
import shutil
import socket
import subprocess
import time
from contextlib import contextmanager

import pytest
from tests.helpers.ports import free_port

MOSQUITTO = shutil.which("mosquitto", path=f"{os.environ['PATH']}:/usr/sbin:/usr/local/sbin")
needs_mosquitto = pytest.mark.skipif(MOSQUITTO is None, reason="mosquitto is not installed")


@contextmanager
def mosquitto(folder, *lines):
    """A broker with these lines of mosquitto.conf; its port."""
    folder.mkdir(parents=True, exist_ok=True)
    port = free_port()
    user = ["user root"] if os.geteuid() == 0 else []
    (folder / "mosquitto.conf").write_text("\n".join([f"listener {port} 127.0.0.1", *user, *lines]) + "\n")
    with serving([MOSQUITTO, "-c", folder / "mosquitto.conf"], folder / "log", port):
        yield port


@contextmanager
def mosquitto_at(configuration, port):
    """A broker with a configuration that is given, on the loopback."""
    text = configuration.read_text().replace(f"listener {port}\n", f"listener {port} 127.0.0.1\n")
    user = "user root\n" if os.geteuid() == 0 else ""
    changed = configuration.with_suffix(".here")
    changed.write_text(user + text)
    with serving([MOSQUITTO, "-c", changed], configuration.with_suffix(".log"), port):
        yield


@contextmanager
def serving(command, log, port):
    """A process that listens at a port, until the block ends."""
    with log.open("wb") as output:
        process = subprocess.Popen(command, stderr=output, stdout=output)
    try:
        give_up_at = time.monotonic() + 20
        while True:
            try:
                socket.create_connection(("127.0.0.1", port), 1).close()
                break
            except OSError:
                assert time.monotonic() < give_up_at, log.read_text()
                time.sleep(0.02)
        yield
    finally:
        process.terminate()
        process.wait(10)


@contextmanager
def tls_mosquitto(folder, cert, key):
    """A broker that accepts everybody by TLS; its port."""
    with mosquitto(folder, f"certfile {cert}", f"keyfile {key}", "allow_anonymous true") as port:
        yield port
