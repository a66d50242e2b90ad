"""Fleetune, from Python: the whole of it, with every device's reports, bytes, seconds and joules."""

import sys

from workload_files import Files, device, given, round_over

from fleetune import simulate


def settings_of(files: Files, trainer: str = "torch", precision: str = "float32", at_once: str = "1") -> dict:
    """As a run.toml would say it."""
    asked = files.asked
    training = {name: getattr(asked, name) for name in ("epochs", "batch_size", "learning_rate")}
    return {
        "run": {"name": "bench", "rounds": asked.rounds, "final_evaluation": False},
        "model": {"name": asked.model},
        "method": {"name": "fedavg"},
        "training": training,
        "round": {"participants": asked.participants},
        "fleet": {
            "devices": asked.devices,
            "ratios": [1.0],
            "boards": {"raspberry-pi-4b": asked.devices},
            "trainer": trainer,
            "precision": precision,
            "train_on": device(),
            "at_once": int(at_once),
        },
    }


def main() -> None:
    files, processes = given()
    asked = files.asked
    told = iter(range(1, asked.rounds + 1))
    result = simulate(
        settings_of(files, *sys.argv[3:]),
        "runs",
        data=(files.x, files.y),
        partition=list(zip(files.rows, files.test_rows, strict=True)),
        on_round=lambda _: round_over(next(told)),
        workers=processes,
        report=False,
    )
    (result.folder / "models/shared.safetensors").rename("model.safetensors")


if __name__ == "__main__":
    main()
