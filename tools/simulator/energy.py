"""Computes the energy that all boards of a simulated fleet have used by the end of each round, idling
included.

A reply reports the energy of its round, from the first byte of its task to the last byte of the reply. In the
remaining time a board uses its profile's idle power, from the start of the run to the end of the device's
last round. The energy of a reply that did not count is unknown, so its time counts as idle.
"""

from collections.abc import Iterator, Mapping, Sequence

from fleetune.coordinator.rounds.records import RoundRecord
from fleetune.protocols.settings.run_settings import RunSettings


def idle_watts(settings: RunSettings) -> dict[str, float]:
    """Return the idle power of each device of a simulated fleet.

    Raises:
        SettingError: a board or a link is unknown.
    """
    from fleetune.tools.simulator.device_specs import device_specs

    return {one.name: one.board.idle_w for one in device_specs(settings.fleet, settings.run.seed)}


def joules_by_round(records: Sequence[RoundRecord], idle_w: Mapping[str, float]) -> Iterator[float]:
    """Yield the joules used until the end of each round, ascending; `idle_w` has each device's idle power."""
    there_until_s = {device: record.closed_s for record in records for device in record.participants}
    at_work_j, busy_s = 0.0, dict.fromkeys(idle_w, 0.0)
    for record in records:
        for device, reply in record.devices.items():
            at_work_j += reply.actual.joules or 0.0
            busy_s[device] = busy_s.get(device, 0.0) + reply.actual.known_s
        idle_j = (
            watts * max(0.0, min(record.closed_s, there_until_s.get(device, 0.0)) - busy_s[device])
            for device, watts in idle_w.items()
        )
        yield at_work_j + sum(idle_j)
