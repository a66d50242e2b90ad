"""Formats quantities and names for people; "–" stands for unknown values. Docstrings show examples."""

import time

from fleetune.protocols.conditions import Conditions

UNKNOWN = "–"  # noqa: RUF001 - an en dash, as in printed tables
MOST_LETTERS = 24  # longest name in a label, in characters
_BYTE_UNITS = ("B", "kB", "MB", "GB", "TB")


def size(num_bytes: float | None) -> str:
    """Format a number of bytes: 41 kB, 1.2 MB; decimal units, two to three figures."""
    if num_bytes is None:
        return UNKNOWN
    scale = byte_scale(num_bytes)
    value, unit = num_bytes / 1000**scale, _BYTE_UNITS[scale]
    return f"{value:.1f} {unit}" if scale and value < 9.95 else f"{value:.0f} {unit}"


def byte_scale(num_bytes: float) -> int:
    """Return the power of 1000 that `size` uses for this number of bytes."""
    scale = 0
    while scale < len(_BYTE_UNITS) - 1 and num_bytes >= 999.5 * 1000**scale:
        scale += 1
    return scale


def byte_unit(scale: int) -> str:
    """Return the unit of 1000 ** `scale` bytes, e.g. kB."""
    return _BYTE_UNITS[scale]


def duration(time_s: float | None) -> str:
    """Format a time: 45 ms, 2.1 s, 3 min 05 s, 2 h 05 min."""
    if time_s is None:
        return UNKNOWN
    if time_s < 0.9995:
        return f"{time_s * 1000:.0f} ms" if time_s else "0 s"
    if time_s < 59.5:
        return f"{time_s:.1f} s" if time_s < 9.95 else f"{time_s:.0f} s"
    minutes, rest_s = divmod(round(time_s), 60)
    if minutes < 60:
        return f"{minutes} min {rest_s:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"


def against(actual_s: float | None, predicted_s: float | None) -> str:
    """Format actual and predicted time in one unit: 15.1 / 14.2 s."""
    longest_s = max(actual_s or 0.0, predicted_s or 0.0)
    if not longest_s:
        return UNKNOWN
    scale, unit = clock(longest_s)
    digits = 1 if longest_s < 99.5 * scale else 0
    sides = (
        UNKNOWN if time_s is None else f"{time_s / scale:.{digits}f}" for time_s in (actual_s, predicted_s)
    )
    return f"{' / '.join(sides)} {unit}"


def count(number: float | None) -> str:
    """Format a whole number with separators: 12,345."""
    return UNKNOWN if number is None else f"{number:,}"


def number(value: float | None) -> str:
    """Format a number: 12,345, 2.5, 0.0313; whole numbers in full, others with three significant figures."""
    if value is None:
        return UNKNOWN
    whole = round(value)
    if value == whole or abs(value) >= 999.5:
        return f"{whole:,}" if abs(value) < 1e9 else f"{value:.3g}"
    return f"{value:.3g}"


def number_spread(value: float, deviation: float | None) -> str:
    """Format a number and its standard deviation: 2.5 ±0.3."""
    return number(value) + (f" ±{deviation:.2g}" if deviation else "")


def percent(fraction: float | None) -> str:
    """Format a fraction as percent: 0.9134 as 91.3 %."""
    return UNKNOWN if fraction is None else f"{100 * fraction:.1f} %"


def share(fraction: float) -> str:
    """Format a fraction as whole percent: 0.25 as 25 %."""
    return f"{100 * fraction:.0f} %"


def error(fraction: float | None) -> str:
    """Format a relative error to two figures: 3.7 %, 12 %, 340 %."""
    if fraction is None:
        return UNKNOWN
    return f"{100 * fraction:.{0 if fraction >= 0.0995 else 1}f} %"


def energy(joules: float | None) -> str:
    """Format an energy: 0.19 J, 950 J, 41 kJ, 1.2 MJ."""
    if joules is None:
        return UNKNOWN
    return f"{joules:.2g} J" if joules < 9.95 else size(joules).replace("B", "J")


def change(before: float | None, after: float | None) -> str:
    """Format two fractions, before and after: 87.1 → 91.3 %."""
    if before is None and after is None:
        return UNKNOWN
    return f"{percent(before).removesuffix(' %')} → {percent(after)}"


def number_change(before: float | None, after: float | None) -> str:
    """Format two numbers, before and after: 2.31 → 0.87."""
    return UNKNOWN if before is None and after is None else f"{number(before)} → {number(after)}"


def number_gain(difference: float | None) -> str:
    """Format a difference of two numbers with its sign: +0.31."""
    return UNKNOWN if difference is None else f"{difference:+.3g}"


def points(difference: float | None) -> str:
    """Format a difference of two fractions in percentage points: +4.2."""
    return UNKNOWN if difference is None else f"{100 * difference:+.1f}"


def spread(value: float, deviation: float | None, digits: int = 0, unit: str = "") -> str:
    """Format a number with its standard deviation and unit: 91.3 ±0.4 %.

    The deviation is left out if it is None or too small to show.
    """
    within = "" if deviation is None else f" ±{deviation:.{digits}f}"
    shows = digits or within != " ±0"
    return f"{value:.{digits}f}{within if shows else ''}{' ' if unit else ''}{unit}"


def percent_spread(fraction: float, deviation: float | None) -> str:
    """Format a fraction and its standard deviation as percent: 91.3 ±0.4 %."""
    return spread(100 * fraction, None if deviation is None else 100 * deviation, 1, "%")


def points_spread(difference: float, deviation: float | None) -> str:
    """Format a difference of two fractions and its standard deviation in percentage points: +4.2 ±0.4."""
    return points(difference) + ("" if deviation is None else f" ±{100 * deviation:.1f}")


def energy_spread(joules: float, deviation: float | None) -> str:
    """Format an energy and its standard deviation: 412 ±60 kJ."""
    if joules < 9.95:
        return spread(joules, deviation, 2, "J")
    return size_spread(joules, deviation).replace("B", "J")


def size_spread(num_bytes: float, deviation: float | None) -> str:
    """Format a number of bytes and its standard deviation: 412 ±60 MB."""
    scale = byte_scale(num_bytes)
    value, within = num_bytes / 1000**scale, None if deviation is None else deviation / 1000**scale
    if within is not None and within < 0.05:
        within = None
    return spread(value, within, 1 if scale and value < 9.95 else 0, byte_unit(scale))


def duration_spread(time_s: float, deviation_s: float | None) -> str:
    """Format a time and its standard deviation: 12.1 ±0.4 min."""
    scale, unit = clock(time_s)
    within = None if deviation_s is None or deviation_s < 0.05 * scale else deviation_s / scale
    return spread(time_s / scale, within, 1 if time_s < 99.5 * scale else 0, unit)


def clock(time_s: float) -> tuple[float, str]:
    """Return the unit that suits a time: its length in seconds, and its symbol."""
    units = (3600, "h", 1.5), (60, "min", 1.5), (1, "s", 0.9995)
    return next(((scale, sign) for scale, sign, least in units if time_s >= least * scale), (0.001, "ms"))


def ratio(value: float | None) -> str:
    return UNKNOWN if value is None else f"{value:.2g}"


def conditions(now: Conditions) -> str:
    """Format a board's conditions: battery 43 %, 41 °C, throttled, metered; unknown values are left out."""
    charge = "" if now.battery is None else f" {100 * now.battery:.0f} %"
    power = f"{now.power or 'battery'}{charge}" if now.power or charge else ""
    parts = (
        power,
        "" if now.watts is None else f"{now.watts:.1f} W",
        "" if now.celsius is None else f"{now.celsius:.0f} °C",
        "throttled" if now.throttled else "",
        "metered" if now.metered else "",
        "" if now.memory_bytes is None else f"{size(now.memory_bytes)} to use",
    )
    return ", ".join(filter(None, parts)) or UNKNOWN


def ago(at: float | None, now: float) -> str:
    """Format a past time in seconds since 1970: 5 s ago, 12 min ago, 3 h ago, 4 days ago, 2026-05-01."""
    if at is None:
        return UNKNOWN
    past_s = max(0.0, now - at)
    for most_s, length_s, unit in ((60, 1, "s"), (3600, 60, "min"), (86_400, 3600, "h")):
        if past_s < most_s:
            return f"{past_s // length_s:.0f} {unit} ago"
    return f"{past_s // 86_400:.0f} days ago" if past_s < 60 * 86_400 else day(at)


def day(at: float | None) -> str:
    """Format a time in seconds since 1970 as a date."""
    return UNKNOWN if at is None else time.strftime("%Y-%m-%d", time.localtime(at))


def printable(text: str) -> str:
    """Return a peer's text without characters that could control a terminal."""
    return "".join(letter if letter.isprintable() else "�" for letter in text)


def short_board(name: str) -> str:
    """Return a shortened board name for narrow places."""
    return printable(name).replace("raspberry-pi", "rpi")


def clip(name: str, letters: int = MOST_LETTERS) -> str:
    """Return a name shortened to fit a label that cannot wrap."""
    return name if len(name) <= letters else f"{name[: letters - 1]}…"
