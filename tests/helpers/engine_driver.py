"""A driver of the round engine whose updates always aggregate."""

from fleetune.coordinator.rounds.actions import Aggregate
from fleetune.coordinator.rounds.events import Aggregated


def handled(engine, event, now):
    """The actions that follow from an event; every `Aggregate` is answered at once."""
    return answered(engine, engine.handle(event, now), now)


def answered(engine, actions, now):
    """The actions without `Aggregate`; each `Aggregate` is answered with `Aggregated`."""
    todo, done = list(actions), []
    for action in todo:
        if isinstance(action, Aggregate):
            todo.extend(engine.handle(Aggregated(), now))
        else:
            done.append(action)
    return done
