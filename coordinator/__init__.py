"""The program on the edge server: it plans rounds, takes updates in, aggregates them, and reports."""
