"""What a run with [privacy] has spent, and the devices whose updates reveal much without it."""

from collections.abc import Mapping

from msgspec import structs

from fleetune.coordinator.extensions.privacy.accountant import epsilon_of, most_tasks
from fleetune.coordinator.metrics.summary import DeviceSummary, PrivacySummary
from fleetune.coordinator.rounds.engine_state import EngineState
from fleetune.protocols.method.method import DeviceId
from fleetune.protocols.settings.privacy import FEW_SAMPLES, PrivacySection


def privacy_summary(section: PrivacySection, state: EngineState) -> PrivacySummary:
    """Return what the run has spent. Raises SettingError if dp-accounting is not installed."""
    tasks = state.most_tasks
    return PrivacySummary(
        epsilon=epsilon_of(section, tasks),
        delta=section.delta,
        max_epsilon=section.max_epsilon,
        tasks=tasks,
        most_tasks=most_tasks(section),
        noise=section.noise,
        clip=section.clip,
        noise_multiplier=section.noise_multiplier,
        scores=section.scores,
    )


def with_epsilon(
    rows: Mapping[DeviceId, DeviceSummary], section: PrivacySection, state: EngineState
) -> dict[DeviceId, DeviceSummary]:
    """Return the devices' rows with what each device's tasks have spent."""
    return {
        device: structs.replace(row, epsilon=epsilon_of(section, state.member(device).tasks))
        for device, row in rows.items()
    }


def few_samples_line(rows: Mapping[DeviceId, DeviceSummary], privacy: object) -> str | None:
    """Return a warning about devices with few training samples; None if there are none.

    Local noise hides their updates from everybody, so it needs no warning.
    """
    if isinstance(privacy, PrivacySummary) and privacy.noise == "local":
        return None
    counts = ((name, row.num_samples) for name, row in rows.items())
    few = [name for name, count in counts if count is not None and count < FEW_SAMPLES]
    if not few:
        return None
    named = ", ".join(few[:5]) + (f" and {len(few) - 5} more" if len(few) > 5 else "")
    return (
        f"Fewer than {FEW_SAMPLES} training samples: {named}. One update of a first round can give a device's"
        ' samples back. Collect more samples, or use [privacy] with noise = "local".'
    )
