"""The simulator beside others of its kind: the same networks, samples and work, in turns on one machine."""
