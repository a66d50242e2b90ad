"""Decides which agent may use a device's name when several agents use the same name.

A broker allows one connection for each name, and closes the earlier one. An agent that starts after another
has ended is a restart. An agent that reconnects after another took its name proves that both run, so two
devices share one name. The agent that held the name first keeps it. The other agents must wait.

This module has no clock and no network: times in seconds of a monotonic clock are arguments.
"""

from dataclasses import dataclass, field

RETURN_S = 120.0  # an agent that comes back later than this after it was replaced counts as a restart
FIRST_WAIT_S = 10.0  # longer than the holder needs to connect again once it was disconnected
LONGEST_WAIT_S = 300.0
FORGET_S = 3 * LONGEST_WAIT_S  # an agent that was told to wait and did not come back
MAX_CLAIMS = 16  # agents remembered of one name


@dataclass
class _Claim:
    """One agent's claim to a name.

    Attributes:
        seen_at: the time at which the agent last connected.
        replaced_at: the time at which another agent took the name; None while this agent holds it or waits.
        wait_s: the latest waiting time that was requested of the agent, in seconds; 0 if none was.
        holder_seen_at: the time of the holder's latest connection when this agent was asked to wait.
    """

    seen_at: float
    replaced_at: float | None = None
    wait_s: float = 0.0
    holder_seen_at: float | None = None


@dataclass
class _Name:
    """All claims to one name, by agent instance; the earliest claim is first."""

    holder: str
    claims: dict[str, _Claim]
    second: set[str] = field(default_factory=set)  # instances that run at the same time as the holder


class DuplicateNames:
    """Tracks which agent holds each device name."""

    def __init__(self) -> None:
        self._names: dict[str, _Name] = {}

    def connected(self, device: str, instance: str, now: float) -> float:
        """Record that an agent connects by this name, and return how long it must stay away.

        Args:
            device: the name.
            instance: id of the agent's process, new at each of its starts.
            now: seconds of a monotonic clock.

        Returns:
            0 if the agent holds the name, else the seconds for which it must stay away.
        """
        name = self._names.get(device)
        if name is None:
            self._names[device] = _Name(instance, {instance: _Claim(now)})
            return 0.0
        self._forget_old(name, now)
        claim = name.claims.setdefault(instance, _Claim(now))
        claim.seen_at = now
        if instance == name.holder:
            return 0.0
        if instance in name.second:
            return self._wait(name, instance)
        if claim.replaced_at is not None:  # it comes back: those that came after it run too
            order = list(name.claims)
            name.second.update(order[order.index(instance) + 1 :])
        self._take_over(name, instance, now)
        return 0.0

    def shared(self, device: str) -> bool:
        """True if several running agents use this name."""
        name = self._names.get(device)
        return name is not None and bool(name.second)

    def look(self, now: float) -> list[str]:
        """Return the names that have become unique: only one agent still uses them."""
        again = []
        for device, name in self._names.items():
            if name.second:
                self._forget_old(name, now)
                again += [] if name.second else [device]
        return again

    def forget(self, device: str) -> None:
        """Forget a name that no device of the run uses."""
        self._names.pop(device, None)

    def _wait(self, name: _Name, instance: str) -> float:
        claim, holder = name.claims[instance], name.claims[name.holder]
        if claim.holder_seen_at == holder.seen_at:  # the holder did not connect again, so it has ended
            name.second.discard(instance)
            self._take_over(name, instance, claim.seen_at)
            return 0.0
        claim.holder_seen_at = holder.seen_at
        claim.wait_s = min(LONGEST_WAIT_S, 2 * claim.wait_s or FIRST_WAIT_S)
        return claim.wait_s

    @staticmethod
    def _take_over(name: _Name, instance: str, now: float) -> None:
        before, claim = name.claims[name.holder], name.claims[instance]
        before.replaced_at = None if name.holder in name.second else now
        claim.replaced_at = None
        name.holder = instance

    @staticmethod
    def _forget_old(name: _Name, now: float) -> None:
        for instance, claim in tuple(name.claims.items()):
            second = instance in name.second
            old = (
                now - claim.seen_at > FORGET_S
                if second
                else (claim.replaced_at is not None and now - claim.replaced_at > RETURN_S)
            )
            if instance != name.holder and (old or len(name.claims) > MAX_CLAIMS):
                del name.claims[instance]
                name.second.discard(instance)
