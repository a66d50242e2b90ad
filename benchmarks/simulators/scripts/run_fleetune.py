"""Fleetune from Python, with all reports, bytes, seconds and joules of every device."""

import sys

from workload_files import Files, device, given, round_over

from fleetune import simulate


def settings_of(files: Files, trainer: str = "torch", precision: str = "float32") -> dict:
    """Settings of the run, by section."""
    workload = files.workload
    training = {name: getattr(workload, name) for name in ("epochs", "batch_size", "learning_rate")}
    return {
        "run": {"name": "bench", "rounds": workload.rounds, "final_evaluation": False},
        "model": {"name": workload.model},
        "method": {"name": "fedavg"},
        "training": training,
        "round": {"participants": workload.participants},
        "fleet": {
            "devices": workload.devices,
            "ratios": [1.0],
            "boards": {"raspberry-pi-4b": workload.devices},
            "trainer": trainer,
            "precision": precision,
            "train_on": device(),
        },
    }


def main() -> None:
    files, processes = given()
    workload = files.workload
    numbers = iter(range(1, workload.rounds + 1))
    result = simulate(
        settings_of(files, *sys.argv[3:]),
        "runs",
        data=(files.x, files.y),
        partition=list(zip(files.rows, files.test_rows, strict=True)),
        on_round=lambda _: round_over(next(numbers)),
        workers=processes,
        report=False,
    )
    (result.folder / "models/shared.safetensors").rename("model.safetensors")


if __name__ == "__main__":
    main()
