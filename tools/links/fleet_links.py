"""Creates the link of each device from the section [fleet]."""

from collections.abc import Sequence
from pathlib import Path

from fleetune.protocols.errors import SettingError
from fleetune.protocols.randomness import Key
from fleetune.protocols.settings.simulation import FleetSection, WirelessSection
from fleetune.protocols.wire.payloads import run_key
from fleetune.tools.links.link import Constant, Link, Trace
from fleetune.tools.links.presets import preset
from fleetune.tools.links.radio_cell import wireless_link
from fleetune.tools.links.trace_csv import read_trace


def links_of(fleet: FleetSection, seed: int) -> list[Link | None]:
    """Return the link of each device, in the order of the devices; None for a device without an entry in
    `links`.

    Args:
        fleet: the section [fleet].
        seed: seed of the run; the random parts of a link depend on it and on the device's number.

    Raises:
        SettingError: an unknown preset, a trace file that cannot be read, or more links than devices.
    """
    listed = sum(fleet.links.values())
    if listed > fleet.devices:
        raise SettingError(
            f"fleet.links lists {listed} links, but fleet.devices = {fleet.devices}; list at most one for"
            " each device"
        )
    keys = [run_key(seed).child("link", index) for index in range(fleet.devices)]
    links: list[Link | None] = []
    for name, count in fleet.links.items():
        links += links_named(name, keys[len(links) : len(links) + count])
    rest = keys[listed:]
    cell = WirelessSection() if fleet.wireless is True else fleet.wireless
    return links + ([wireless_link(cell, key) for key in rest] if cell else [None] * len(rest))


def links_named(
    name: str, keys: Sequence[Key], *, delay_s: float = 0.0, loss: float = 0.0
) -> list[Constant | Trace]:
    """Return one link for each key, from a preset or from a trace file.

    A preset draws each link from its key. A trace file gives all keys the same link.

    Args:
        name: name of a preset, or the path of a .csv file.
        keys: one for each link.
        delay_s: one-way delay for a trace file; a preset has its own.
        loss: packet loss for a trace file, 0..1; a preset has its own.

    Raises:
        SettingError: an unknown preset, or a trace file that cannot be read.
    """
    if name.endswith(".csv"):
        return [read_trace(Path(name), delay_s=delay_s, loss=loss)] * len(keys)
    kind = preset(name)
    return [kind.link(key) for key in keys]
