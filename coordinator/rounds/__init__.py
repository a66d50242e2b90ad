"""The round engine and its policies: events in, actions out. No I/O, no clock, no knowledge of the method."""
