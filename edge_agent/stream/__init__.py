"""Streams: samples that arrive over time, stored on the device within the owner's limits.

`sample_store` stores the samples (`store_schema`, `retention`, `deletion`), and `snapshot` reads the samples
of a round. `intakes` bring samples in: a watched folder, a generator function, an MQTT topic and the library
call `Intake`. `drift` tests whether new samples differ from earlier ones. `sample_stream` joins these parts
for the agent. No module here depends on runs, models or training.
"""

from fleetune.edge_agent.stream.intakes.library_call import Intake

__all__ = ["Intake"]
