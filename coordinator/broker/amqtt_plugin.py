"""A plugin for the amqtt broker: one connection for each client id. amqtt has no type annotations."""

from typing import Any

from amqtt.contexts import BaseContext
from amqtt.plugins.base import BasePlugin
from amqtt.session import Session


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
