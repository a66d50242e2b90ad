"""What readings of a fleet that is left on come to: what stays, what grows."""

import json
import os

import pytest
from benchmarks.long_run import Reading, Sensor, closed_rounds, growth, is_flat, read_part, report


def readings(**histories):
    """A hundred of the agent, each figure by its own history over 10,000 rounds."""
    fixed = {"part": "agent", "resident_mb": 90.0, "files": 14, "threads": 6}
    fixed |= {"folder_mb": 5.0, "folder_files": 16, "past_mb": 0.0}
    return [
        Reading(**{**fixed, **{key: history(n) for key, history in histories.items()}}, round=100 * n, at_s=n)
        for n in range(1, 101)
    ]


@pytest.mark.parametrize(
    ("key", "history", "flat"),
    [
        ("resident_mb", lambda n: 90 + 0.3 * (n % 3), True),
        ("resident_mb", lambda n: 60 + min(n, 45), True),  # grew into what it needs, then stayed
        ("resident_mb", lambda n: 90 + 0.05 * n, False),  # 5 MB in 10,000 rounds
        ("files", lambda n: 14 + n % 2, True),
        ("files", lambda n: 14 + n // 20, False),
        ("folder_mb", lambda n: 5 + 0.02 * n, False),
    ],
)
def test_growth_is_distinguished_from_a_constant_size(key, history, flat):
    found = readings(**{key: history})
    assert is_flat(key, *growth(found, key)) == flat
    verdicts = [line for line in report(found) if f"| {key} |" in line]
    assert verdicts[0].endswith("| flat |" if flat else "| grows |")


def test_a_process_and_its_folder_are_read(tmp_path):
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "a").write_bytes(b"x" * 1_000_000)
    (tmp_path / "rounds-past.jsonl").write_bytes(b"x" * 2_000_000)
    found = read_part("agent", os.getpid(), tmp_path, 7, 1.0)
    assert (found.folder_mb, found.folder_files, found.past_mb) == (1.0, 1, 2.0)
    assert found.resident_mb > 20
    assert found.threads >= 1
    assert found.files >= 3


def test_the_newest_whole_line_says_how_many_rounds_have_closed(tmp_path):
    journal = tmp_path / "rounds.jsonl"
    assert closed_rounds(journal) == 0
    lines = [json.dumps({"number": number, "pad": "x" * 1000}) for number in range(1, 200)]
    journal.write_text("\n".join(lines) + '\n{"number": 200, "pa')
    assert closed_rounds(journal) == 199


def test_a_sensor_sends_late_labels_and_bad_samples_among_the_others():
    sensor, sent = Sensor(1, 20.0), []
    for number in range(100):
        sensor.sent = number
        sent += list(sensor._messages([[0.5]], 3))
    assert len(sent) == 110, "a tenth in two messages"
    assert sum("x" in one and "y" not in one for one in sent) == 10
    assert sum(one.get("x") == [0.0, 1.0] for one in sent) == 2
