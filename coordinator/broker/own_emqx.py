"""Writes settings and access rules for the user's own EMQX 5, from its documentation. They are not tried."""

from pathlib import Path
from typing import ClassVar

from fleetune.coordinator.broker.access_rules import DEVICE_READS, DEVICE_WRITES
from fleetune.coordinator.broker.embedded_broker import MAX_MESSAGE_BYTES, MAX_QUEUED_MESSAGES
from fleetune.coordinator.broker.own_broker import OwnBroker
from fleetune.protocols.wire.topics import COORDINATOR_USER, ROOT

_NOT_TRIED = "Written by `edge-coordinator broker-config --for emqx` from EMQX 5's documentation. NOT TRIED."


class OwnEmqx(OwnBroker):
    """Settings of an EMQX 5 that serves one or more fleets."""

    configuration_file: ClassVar[str] = "fleetune.hocon"
    rules_file: ClassVar[str] = "fleetune.acl.conf"
    home: ClassVar[Path] = Path("/etc/emqx")
    read_from: ClassVar[str] = "emqx.conf"

    def rules(self) -> str:
        """Return the content of the file of access rules, as Erlang terms."""
        lines = [
            f"%% {_NOT_TRIED}",
            "%% A device's user has the device's id. It reaches its own topics only.",
        ]
        for fleet in self.fleets:
            lines.append(f'{{allow, {{username, "{COORDINATOR_USER}"}}, all, ["{ROOT}/{fleet}/#"]}}.')
            for action, channels in (("publish", DEVICE_WRITES), ("subscribe", DEVICE_READS)):
                topics = ", ".join(f'"{ROOT}/{fleet}/${{username}}/{channel}"' for channel in channels)
                lines.append(f"{{allow, all, {action}, [{topics}]}}.")
        return "\n".join([*lines, "{deny, all}."]) + "\n"

    def configuration(self, folder: Path) -> str:
        """Return settings to append to `emqx.conf`, which name files in `folder`."""
        max_packet = (MAX_MESSAGE_BYTES + 65_536) // 1024
        kind, other = ("tcp", "ssl") if self.cert is None else ("ssl", "tcp")
        lines = [
            f"# {_NOT_TRIED}",
            "# Append these lines to emqx.conf, on an EMQX that serves Fleetune only: they replace all of",
            "# its access rules and authentication, and switch its other listeners off.",
            "mqtt {",
            f"  max_packet_size = {max_packet}KB",
            f"  max_mqueue_len = {MAX_QUEUED_MESSAGES}",
            *([] if self.ca is None else ["  peer_cert_as_username = cn"]),
            "}",
            "authorization {",
            "  no_match = deny",
            f'  sources = [{{type = file, enable = true, path = "{folder / self.rules_file}"}}]',
            "}",
            f"listeners.{other}.default.enable = false",
            "listeners.ws.default.enable = false",
            "listeners.wss.default.enable = false",
            f'listeners.{kind}.default.bind = "0.0.0.0:{self.listening_port}"',
        ]
        if self.ca is None:
            lines.append(
                "authentication = [{mechanism = password_based, backend = built_in_database,"
                " user_id_type = username}]"
            )
        if self.cert is not None and self.key is not None:
            lines += [
                "listeners.ssl.default.ssl_options {",
                f'  certfile = "{self.cert.absolute()}"',
                f'  keyfile = "{self.key.absolute()}"',
                '  versions = ["tlsv1.3", "tlsv1.2"]',
            ]
            if self.ca is not None:
                lines += [
                    f'  cacertfile = "{self.ca.absolute()}"',
                    "  verify = verify_peer",
                    "  fail_if_no_peer_cert = true",
                ]
            lines.append("}")
        return "\n".join(lines) + "\n"

    def next_steps(self, folder: Path) -> str:  # noqa: ARG002 - EMQX stores its users itself
        """Return instructions for creating users, as lines of text."""
        if self.ca is not None:
            who = f"common names of certificates: {COORDINATOR_USER}, and of each device its id"
        else:
            who = (
                f"add users in EMQX's dashboard (Access Control, Authentication): {COORDINATOR_USER}, and for"
                " each device its id"
            )
        return (
            f"{who}\n"
            "these settings replace EMQX's access rules and switch off its other listeners\n"
            "do not use them on a broker that others share\n"
            "NOT TRIED: check first that a device cannot read another's topics"
        )
