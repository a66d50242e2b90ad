"""The round engine and what decides in it: events in, actions out; no I/O, no clock, no method."""
