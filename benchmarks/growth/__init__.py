"""Growth of a simulated round's cost with devices, participants and parameters."""
