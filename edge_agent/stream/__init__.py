"""Data that grow: samples as they come, kept on the device within its owner's bounds, and snapshots of them
to train on.

`sample_store` keeps them (`store_layout`, `retention`, `snapshot`); feeders bring them: a watched folder, a
user's iterator, a local socket, and `Intake`, the library call. `sample_stream` is all of it as the agent
sees it. Nothing here knows of runs, models or training.
"""

from fleetune.edge_agent.stream.intakes.library_call import Intake

__all__ = ["Intake"]
