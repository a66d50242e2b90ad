"""Mutated packets through everything that reads what a peer sent: `python -m tests.fuzz`."""
