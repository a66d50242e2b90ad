"""Settings and rules for a mosquitto of one's own, as `edge-coordinator broker-config` writes them."""

import shutil

import pytest
from tests.edge_agent.doctor.test_doctor import Authority
from tests.helpers.own_mosquitto import mosquitto_at, needs_mosquitto
from tests.helpers.ports import free_port
from typer.testing import CliRunner

from fleetune.coordinator.broker.own_broker import OwnBroker
from fleetune.coordinator.cli import app
from fleetune.edge_agent.probes.channel_rights import find_channel_rights
from fleetune.protocols.wire import topics
from fleetune.protocols.wire.transport.mqtt import Broker


def broker_config(*options):
    return CliRunner().invoke(app, ["broker-config", *map(str, options)])


def test_printed_it_says_where_each_file_belongs_and_how_users_get_in():
    done = broker_config("--fleet", "one", "--fleet", "two")
    assert done.exit_code == 0
    assert "### /etc/mosquitto/conf.d/fleetune.conf" in done.output
    for line in (
        "listener 1883",
        "acl_file /etc/mosquitto/fleetune.acl",
        "password_file /etc/mosquitto/fleetune.passwords",
        "allow_anonymous false",
        "topic readwrite fleetune/v1/one/#",
        "pattern readwrite fleetune/v1/two/%u/probe",
        "pattern read fleetune/v1/two/%u/down",
    ):
        assert line in done.output.splitlines()
    assert "mosquitto_passwd /etc/mosquitto/fleetune.passwords coordinator" in done.output
    assert "chown mosquitto: /etc/mosquitto/fleetune.passwords" in done.output


def test_files_for_emqx_say_that_they_are_not_tried(tmp_path):
    files = ("--cert", "server.pem", "--key", "server.key", "--ca", "ca.pem")
    done = broker_config("--for", "emqx", "--fleet", "one", "--out", tmp_path, *files)
    assert done.exit_code == 0, done.output
    assert "NOT TRIED" in done.output
    rules, settings = ((tmp_path / name).read_text() for name in ("fleetune.acl.conf", "fleetune.hocon"))
    for text in (rules, settings):
        assert "NOT TRIED" in text
    assert '{allow, {username, "coordinator"}, all, ["fleetune/v1/one/#"]}.' in rules
    assert '"fleetune/v1/one/${username}/update"' in rules
    assert rules.rstrip().endswith("{deny, all}.")
    assert "peer_cert_as_username = cn" in settings
    assert f'path = "{tmp_path / "fleetune.acl.conf"}"' in settings
    passwords = broker_config("--for", "emqx", "--fleet", "one").output
    assert "backend = built_in_database" in passwords
    assert "### /etc/emqx/emqx.conf" in passwords


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--fleet", "a/b"), "fleet 'a/b'"),
        (("--fleet", "f", "--cert", "x.pem"), "both --cert and --key"),
        (("--fleet", "f", "--ca", "x.pem"), "needs --cert and --key"),
        (("--fleet", "f", "--out", "/dev/null/x"), "cannot write /dev/null/x"),
    ],
)
def test_a_mistake_is_one_line(options, said):
    done = broker_config(*options)
    assert done.exit_code == 2
    assert said in done.output
    assert len(done.output.splitlines()) == 1


@pytest.mark.fleet
@needs_mosquitto
@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl is not installed")
def test_with_certificates_the_common_name_is_the_user(tmp_path):
    authority, port = Authority(tmp_path / "ours"), free_port()
    cert, key = authority.issue("server")
    ca = str(authority.pem)
    tls = ("--cert", cert, "--key", key, "--ca", ca)
    done = broker_config("--fleet", "f", "--out", tmp_path / "own", "--port", port, *tls)
    assert "common names of certificates: coordinator, and of each device its name" in done.output
    assert (tmp_path / "own" / OwnBroker.rules_file).exists()
    with mosquitto_at(tmp_path / "own" / OwnBroker.configuration_file, port):
        for name, may in (("pi", True), ("other", False)):
            cert, key = map(str, authority.issue(name))
            where = Broker("127.0.0.1", port, tls=True, ca=ca, cert=cert, key=key)
            rights = find_channel_rights(where, "f", "pi")
            assert rights.echo == may
            assert len(rights.unwritable) == (0 if may else len((*topics.FROM_DEVICE, topics.PROBE)))
