"""Refuses what [privacy] cannot protect, before a run begins; the table in the docs uses the same rules."""

from typing import Any

from fleetune.coordinator.extensions.privacy.accountant import most_tasks
from fleetune.protocols.errors import SettingError
from fleetune.protocols.method.averaging import Update
from fleetune.protocols.method.method import Method
from fleetune.protocols.settings.privacy import PrivacySection
from fleetune.protocols.settings.run_settings import RunSettings
from fleetune.protocols.update.encodings import chosen
from fleetune.protocols.update.encodings.encoding import Encoding


def leak_of(kind: type[Method[Any, Any, Any, Any]] | type[Encoding]) -> str | None:
    """Return why a method or an encoding cannot be used with [privacy]; None if it can.

    What a base class states does not hold for a subclass, which may send other things.
    """
    if "leak" in vars(kind):
        return kind.leak
    return f"{kind.__name__} does not state what it reveals: set `leak` in the class itself"


def check_privacy(settings: RunSettings, method: Method[Any, Any, Any, Any]) -> None:
    """Raise SettingError if the run has [privacy] together with a setting that it cannot protect."""
    section = settings.privacy
    if section is None:
        return
    most_tasks(section)
    if (leak := leak_of(type(method))) is not None:
        raise SettingError(f"[privacy] is not for method {settings.method['name']}: {leak}")
    if method.update_type is not Update:
        raise SettingError(
            f"[privacy] is not for method {settings.method['name']}: its updates are"
            f" {method.update_type.__name__}, and only protocols.method.averaging.Update is bounded"
        )
    for up in settings.uplinks:
        encoding = chosen(up)
        if (leak := leak_of(type(encoding))) is not None:
            raise SettingError(f"[privacy] is not for encoding.up = {encoding.name}: {leak}; use lossless")
    for key, is_set, why in _conflicts(settings, section, method):
        if is_set:
            raise SettingError(f"[privacy] does not go with {key}: {why}")


def _conflicts(
    settings: RunSettings, section: PrivacySection, method: Method[Any, Any, Any, Any]
) -> tuple[tuple[str, bool, str], ...]:
    """Return settings that cannot be protected: each one's name, True if it is set, and the reason."""
    return (
        (
            f'round.mode = "{settings.round.mode}"',
            settings.round.mode != "synchronous",
            'late updates are not counted; use "synchronous"',
        ),
        (
            f'round.prefer = "{settings.round.prefer}"',
            settings.round.by_utility,
            'it selects devices by their losses; use "any"',
        ),
        (
            f'round.robust = "{settings.round.robust}" with central noise',
            settings.round.robust != "none" and not section.is_local,
            'it compares updates, whose bound is for their sum; use "none", or noise = "local"',
        ),
        (
            "round.quarantine",
            settings.round.quarantine is not None,
            "it leaves updates out by their values; leave it out",
        ),
        (
            "[objective]",
            settings.proposes_ratios,
            "it plans by figures of the devices' updates; leave it out",
        ),
        (
            "adoption.canary",
            bool(settings.adoption.canary),
            "devices would report how they score each version; leave it out",
        ),
        (
            "held-out samples of the method",
            method.needs_validation,
            "a device would leave by its own loss, which the others see; set early_stopping = false",
        ),
        (
            "run.rounds",
            settings.run.is_open and section.max_epsilon is None,
            "an open run has no last round, so epsilon grows for ever; set privacy.max_epsilon",
        ),
    )
