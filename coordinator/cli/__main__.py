"""`python -m fleetune.coordinator.cli` runs edge-coordinator."""

from fleetune.coordinator.cli import app

if __name__ == "__main__":
    app()
