"""Checks if traffic over the present network costs money, as far as the system knows."""

import re
from pathlib import Path

from fleetune.edge_agent.probes.files_and_commands import ROOT, Run, json_object, read_text, run_command

_NM = "org.freedesktop.NetworkManager"
_MODEM = re.compile(r"(wwan|wwp|ppp|rmnet|ccmni|usbmodem)")
_METERED = {"1": True, "2": False, "3": True, "4": False}  # NMMetered: yes, no, guessed yes, guessed no
_ON_METERED = {"yes": True, "no": False}


def metered(root: Path = ROOT, run: Run = run_command) -> bool | None:
    """Return True if the default route is metered, by NetworkManager, a modem, or Android."""
    interface = default_interface(root)
    for answer in (_by_bus(run), _by_nmcli(interface, run)):
        if answer is not None:
            return answer
    if interface is not None and _MODEM.match(interface):
        return True
    return _on_android(run)


def default_interface(root: Path = ROOT) -> str | None:
    """Return the network interface of the IPv4 default route with the lowest metric."""
    routes = []
    for line in (read_text(root / "proc/net/route") or "").splitlines()[1:]:
        words = line.split()
        if len(words) >= 8 and words[1] == words[7] == "00000000" and words[6].isdecimal():
            routes.append((int(words[6]), words[0]))
    return min(routes)[1] if routes else None


def _by_bus(run: Run) -> bool | None:
    """Return NetworkManager's property `Metered` from the bus, a number after its type, as in `u 4`."""
    words = (run(["busctl", "get-property", _NM, f"/{_NM.replace('.', '/')}", _NM, "Metered"]) or "").split()
    return _METERED.get(words[1]) if len(words) == 2 and words[0] == "u" else None


def _by_nmcli(interface: str | None, run: Run) -> bool | None:
    """Return the value in nmcli's output, as in `GENERAL.METERED:no (guessed)`."""
    if interface is None:
        return None
    output = run(["nmcli", "-t", "-f", "GENERAL.METERED", "device", "show", interface]) or ""
    words = output.strip().partition("GENERAL.METERED:")[2].split()
    return _ON_METERED.get(words[0]) if words else None


def _on_android(run: Run) -> bool | None:
    """Return Termux's answer, True for mobile data. Wi-Fi that costs money is not recognised."""
    output = json_object(run(["termux-wifi-connectioninfo"]))
    if "supplicant_state" not in output:
        return None
    return output["supplicant_state"] != "COMPLETED" or output.get("ip") in (None, "", "0.0.0.0")  # noqa: S104 - compared
