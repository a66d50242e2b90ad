"""Plugins that amqtt loads in its own process: passwords and rules of one fleet.

See `access_rules`. amqtt has no types.
"""

from dataclasses import dataclass
from functools import cache
from pathlib import Path

from amqtt.contexts import Action
from amqtt.plugins.base import BaseAuthPlugin, BaseTopicPlugin
from amqtt.session import Session

from fleetune.coordinator.broker.access_rules import may
from fleetune.coordinator.broker.credentials import is_password


@cache
def _users(password_file: str) -> dict[str, str]:
    lines = Path(password_file).read_text(encoding="utf-8").splitlines()
    return {user: hashed for user, _, hashed in (line.partition(":") for line in lines)}


class FleetPasswords(BaseAuthPlugin):  # type: ignore[misc]
    """Lets in who has a user's password, and whose will is for a topic that it may write."""

    async def authenticate(self, *, session: Session) -> bool | None:
        users = _users(self._get_config_option("password_file", ""))
        user, password = session.username or "", session.password or ""
        if user not in users or not is_password(password, users[user]):
            return False
        fleet, will = self._get_config_option("fleet", ""), session.will_topic
        return not will or may(fleet, user, session.client_id or "", will, write=True)

    @dataclass
    class Config:
        """The plugin's options."""

        fleet: str = ""
        password_file: str = ""


class FleetTopics(BaseTopicPlugin):  # type: ignore[misc]
    """Decides who may write and read what."""

    async def topic_filtering(
        self, *, session: Session | None = None, topic: str | None = None, action: Action | None = None
    ) -> bool | None:
        if session is None or not topic:
            return False
        fleet, client = self._get_config_option("fleet", ""), session.client_id or ""
        return may(fleet, session.username, client, topic, write=action == Action.PUBLISH)

    @dataclass
    class Config:
        """The plugin's options."""

        fleet: str = ""
