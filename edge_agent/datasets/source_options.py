"""Options after the question mark of a data source, as in `csv:FILE?label=COLUMN&window=24`."""

from collections import Counter
from collections.abc import Sequence
from urllib.parse import parse_qsl

from fleetune.protocols.errors import DataError


def source_options(source: str, options: str) -> dict[str, str]:
    """Read `name=value` pairs separated by `&`.

    Args:
        source: the source as the user wrote it, for messages.
        options: text after the question mark; "" has no options.

    Raises:
        DataError: a pair is not `name=value`, or a name is given twice.
    """
    try:
        pairs = parse_qsl(options, keep_blank_values=True, strict_parsing=bool(options))
    except ValueError as problem:
        raise DataError(f"{source}: {problem}; write options as in ?noise=0.1&day=monday") from None
    twice = repeated([name for name, _ in pairs])
    if twice is not None:
        raise DataError(f"{source}: option {twice} is given twice; give it once")
    return dict(pairs)


def name_list(text: str) -> list[str]:
    """Return the names in a list that is separated by commas."""
    return [name.strip() for name in text.split(",") if name.strip()]


def repeated(names: Sequence[str]) -> str | None:
    """Return the first name that occurs more than once; None if there is none."""
    return next((name for name, count in Counter(names).items() if count > 1), None)
