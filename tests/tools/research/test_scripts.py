"""Scripts of a researcher: worker processes do not import them, unless they have to."""

import subprocess
import sys
import textwrap

SETTINGS = """
settings = {
    "run": {"name": "small", "rounds": 2, "final_evaluation": False},
    "data": {"source": "digits", "partition": {"kind": "iid", "samples": 20}},
    "model": {"name": "mlp", "input_shape": [1, 8, 8], "num_classes": 10},
    "method": {"name": "fedavg"},
    "training": {"learning_rate": 0.1, "batch_size": 10},
    "fleet": {"devices": 4},
}
"""


def played(folder, script):
    path = folder / "study.py"
    path.write_text(SETTINGS + textwrap.dedent(script))
    done = subprocess.run(
        [sys.executable, str(path)], cwd=folder, capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 0, done.stderr
    return done


def test_a_plain_script_trains_in_workers_which_do_not_import_it(tmp_path):
    done = played(
        tmp_path,
        """
        import fleetune
        print("imported")

        def noisy(labels, devices, random):
            return [random.permutation(len(labels))[:20] for _ in range(devices)]

        result = fleetune.simulate(settings, workers=2, partition=noisy, report=False)
        print(len(result.rounds), "rounds")
        assert __file__.endswith("study.py"), "it is itself again"
        """,
    )
    assert done.stdout.split("\n")[0] == "imported"
    assert done.stdout.count("imported") == 1
    assert "2 rounds" in done.stdout
    assert "Traceback" not in done.stderr


def test_a_tracker_of_the_script_itself_goes_to_workers(tmp_path):
    done = played(
        tmp_path,
        """
        from pathlib import Path
        import fleetune

        class Lines:
            def __init__(self, run):
                self.path = Path(f"{run.settings.method['name']}.told")

            def hear(self, told):
                with self.path.open("a") as file:
                    print(told.number, file=file)

            def finish(self, outcome):
                pass

            def close(self):
                pass

        if __name__ == "__main__":
            fleetune.compare(settings, ["fedavg", "local-only"], seeds=1, workers=2, trackers=[Lines])
        """,
    )
    assert "Traceback" not in done.stderr
    told = {path.name: path.read_text().split() for path in tmp_path.glob("*.told")}
    assert told == {"fedavg.told": ["1", "2"], "local-only.told": ["1", "2"]}
