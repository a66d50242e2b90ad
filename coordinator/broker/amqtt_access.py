"""Plugins for the amqtt broker: check passwords, apply access rules, allow one connection for each client id.

amqtt loads them in its own process. `access_rules` defines the rules. amqtt has no type annotations.
"""

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from amqtt.contexts import Action, BaseContext
from amqtt.plugins.base import BaseAuthPlugin, BasePlugin, BaseTopicPlugin
from amqtt.session import Session

from fleetune.coordinator.broker.access_rules import may
from fleetune.coordinator.fleet.secret_hash import is_hash_of


@cache
def _users(password_file: str) -> dict[str, str]:
    lines = Path(password_file).read_text(encoding="utf-8").splitlines()
    return {user: hashed for user, _, hashed in (line.partition(":") for line in lines)}


class FleetPasswords(BaseAuthPlugin):  # type: ignore[misc]
    """Accepts a client if its password is right and it may write to the topic of its last will."""

    async def authenticate(self, *, session: Session) -> bool | None:
        users = _users(self._get_config_option("password_file", ""))
        user, password = session.username or "", session.password or ""
        if user not in users or not is_hash_of(password, users[user]):
            return False
        fleet, will = self._get_config_option("fleet", ""), session.will_topic
        return not will or may(fleet, user, session.client_id or "", will, write=True)

    @dataclass
    class Config:
        """The plugin's options."""

        fleet: str = ""
        password_file: str = ""


class OneConnection(BasePlugin):  # type: ignore[misc]
    """Closes a client's earlier connection when a client with the same id connects (MQTT 3.1.1, 3.1.4-2).

    amqtt 0.12 leaves the earlier connection open without subscriptions. The agent behind it would not notice.
    """

    def __init__(self, context: BaseContext) -> None:
        super().__init__(context)
        self._handlers: dict[str, Any] = {}

    async def on_broker_client_connected(self, *, client_id: str, client_session: Session) -> None:
        before = self._handlers.get(client_id)
        # amqtt's public context has no access to the handler.
        self._handlers[client_id] = self.context._broker_instance.sessions[client_id][1]  # noqa: SLF001
        if before is not None and before.session is not client_session:
            await before.handle_connection_closed()
            await before.stop()

    async def on_broker_client_disconnected(self, *, client_id: str, client_session: Session) -> None:
        handler = self._handlers.get(client_id)
        if handler is not None and (handler.session is None or handler.session is client_session):
            del self._handlers[client_id]  # `is`, because sessions with one client id compare equal


class FleetTopics(BaseTopicPlugin):  # type: ignore[misc]
    """Applies the fleet's access rules to each publish and subscribe."""

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
