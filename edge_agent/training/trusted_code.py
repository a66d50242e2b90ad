"""What a run may make a device import: only what the device's owner trusts."""

from msgspec import UNSET

from fleetune.protocols.errors import SettingError
from fleetune.protocols.wire.payloads import Enrolment


def check_trust(enrolment: Enrolment, trusted: tuple[str, ...], *, builds_model: bool) -> None:
    """A coordinator must not make a device import whatever it likes.

    Args:
        enrolment: of the run.
        trusted: modules that the owner lets a run name.
        builds_model: by its name, and computes the loss; a bundle imports nothing.

    Raises:
        SettingError: the run names another one.
    """
    by_torch = [enrolment.spec.name] if builds_model else []
    if builds_model and enrolment.task is not UNSET:
        by_torch.append(enrolment.task.loss)
    for named in (*by_torch, str(enrolment.method.get("name")), *enrolment.training.augmentations):
        module, separator, _ = named.partition(":")
        if separator and module not in trusted:
            raise SettingError(f"the run wants {named!r} imported here; --trust {module} allows it")
