"""Where log lines go: to a terminal with the time, to systemd's journal with their priority instead."""

import logging
import os
import sys
from collections.abc import Mapping

from fleetune.edge_agent.service.notify import Notifier, service_manager

_PLAIN = "%(asctime)s %(levelname)s %(message)s"
_PRIORITIES = ((logging.CRITICAL, 2), (logging.ERROR, 3), (logging.WARNING, 4), (logging.INFO, 6))
_DEBUG = 7


def set_up_logging() -> None:
    """On stderr, and the last line as the service's status where a service manager listens."""
    formatter = JournalFormatter() if is_journal(os.environ) else logging.Formatter(_PLAIN)
    handler = logging.StreamHandler()
    handler.setFormatter(formatter)
    manager = service_manager()
    handlers: list[logging.Handler] = [handler, *([StatusLine(manager)] if manager.listens else [])]
    logging.basicConfig(level=logging.INFO, handlers=handlers)


def is_journal(environment: Mapping[str, str]) -> bool:
    """Whether stderr is what JOURNAL_STREAM names by device and inode: a program that was started with
    its output redirected inherits the variable, but not the stream (systemd.exec(5)).
    """
    try:
        found = os.fstat(sys.stderr.fileno())
    except (OSError, ValueError, AttributeError):  # closed, or not a file
        return False
    return environment.get("JOURNAL_STREAM") == f"{found.st_dev}:{found.st_ino}"


class JournalFormatter(logging.Formatter):
    """`<4>message`, every line with the syslog priority (sd-daemon(3)); the journal has the time."""

    def format(self, record: logging.LogRecord) -> str:
        prefix = f"<{_priority(record.levelno)}>"
        return "\n".join(prefix + line for line in super().format(record).splitlines() or [""])


class StatusLine(logging.Handler):
    """The last thing that was logged is what `systemctl status` shows."""

    def __init__(self, manager: Notifier) -> None:
        super().__init__(logging.INFO)
        self._manager = manager

    def emit(self, record: logging.LogRecord) -> None:
        self._manager.status(record.getMessage())


def _priority(level: int) -> int:
    return next((priority for least, priority in _PRIORITIES if level >= least), _DEBUG)
