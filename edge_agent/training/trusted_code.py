"""Limits the modules that a run can make a device import to those that its owner trusts."""

from msgspec import UNSET

from fleetune.protocols.errors import SettingError
from fleetune.protocols.wire.payloads import Enrolment


def check_trust(enrolment: Enrolment, trusted: tuple[str, ...], *, builds_model: bool) -> None:
    """Raise SettingError if a run names code that the owner does not trust.

    Args:
        enrolment: the run's enrolment.
        trusted: modules that the owner lets a run name.
        builds_model: True if this device builds the model by its name and computes the loss. A bundle
            imports nothing.

    Raises:
        SettingError: the run names another module.
    """
    by_torch = [enrolment.spec.name] if builds_model else []
    if builds_model and enrolment.task is not UNSET:
        by_torch.append(enrolment.task.loss)
    for named in (*by_torch, str(enrolment.method.get("name")), *enrolment.training.augmentations):
        module, separator, _ = named.partition(":")
        if separator and module not in trusted:
            raise SettingError(
                f"the run wants to import {named!r} on this device; allow it with --trust {module}"
            )
