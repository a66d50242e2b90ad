"""Fleetune's simulator against Flower, pfl-research, APPFL and a bare loop, on the same work."""
