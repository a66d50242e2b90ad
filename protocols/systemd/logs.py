"""Configures logging: with the time on a terminal, with syslog priorities in systemd's journal."""

import logging
import os
import sys
from collections.abc import Mapping

from fleetune.protocols.systemd.notify import Notifier, service_manager

_PLAIN = "%(asctime)s %(levelname)s %(message)s"
_PRIORITIES = ((logging.CRITICAL, 2), (logging.ERROR, 3), (logging.WARNING, 4), (logging.INFO, 6))
_DEBUG = 7


def set_up_logging(level: int = logging.INFO, *, status_line: bool = False) -> None:
    """Log to stderr; with `status_line`, also report the last line to a service manager as its status."""
    formatter = JournalFormatter() if is_journal(os.environ) else logging.Formatter(_PLAIN)
    handler = logging.StreamHandler()
    handler.setFormatter(formatter)
    handlers: list[logging.Handler] = [handler]
    if status_line and service_manager().listens:
        handlers.append(StatusLine(service_manager()))
    logging.basicConfig(level=level, handlers=handlers)


def is_journal(environment: Mapping[str, str]) -> bool:
    """True if stderr is the stream that JOURNAL_STREAM names by device and inode.

    A program with redirected output inherits the variable, but not the stream (systemd.exec(5)).
    """
    try:
        found = os.fstat(sys.stderr.fileno())
    except (OSError, ValueError, AttributeError):  # closed, or not a file
        return False
    return environment.get("JOURNAL_STREAM") == f"{found.st_dev}:{found.st_ino}"


class JournalFormatter(logging.Formatter):
    """Formats lines as `<4>message` with the syslog priority (sd-daemon(3)). The journal adds the time."""

    def format(self, record: logging.LogRecord) -> str:
        prefix = f"<{_priority(record.levelno)}>"
        return "\n".join(prefix + line for line in super().format(record).splitlines() or [""])


class StatusLine(logging.Handler):
    """Sends the last log line to `systemctl status`."""

    def __init__(self, manager: Notifier) -> None:
        super().__init__(logging.INFO)
        self._manager = manager

    def emit(self, record: logging.LogRecord) -> None:
        self._manager.status(record.getMessage())


def _priority(level: int) -> int:
    return next((priority for least, priority in _PRIORITIES if level >= least), _DEBUG)
