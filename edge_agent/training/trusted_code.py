"""What a run may make a device import: only what the device's owner trusts."""

from fleetune.protocols.errors import SettingError
from fleetune.protocols.wire.payloads import Enrolment


def check_trust(enrolment: Enrolment, trusted: tuple[str, ...], *, builds_model: bool) -> None:
    """A coordinator must not make a device import whatever it likes.

    Args:
        enrolment: of the run.
        trusted: modules that the owner lets a run name.
        builds_model: by its name; a bundle imports nothing.

    Raises:
        SettingError: the run names another one.
    """
    named_models = (enrolment.spec.name,) if builds_model else ()
    for named in (*named_models, str(enrolment.method.get("name"))):
        module, separator, _ = named.partition(":")
        if separator and module not in trusted:
            raise SettingError(f"the run wants {named!r} imported here; --trust {module} allows it")
