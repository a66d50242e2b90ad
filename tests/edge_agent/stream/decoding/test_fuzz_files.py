"""Changed files of every kind are read or refused by name; `python -m tests.fuzz.files` reads 105,000."""

from contextlib import closing

import pytest
from tests.fuzz.files import MEMORY_BYTES, child_kinds, fuzz, own_kinds

from fleetune.edge_agent.stream.decoding.decoder_process import DecoderProcess


@pytest.mark.parametrize(
    ("kinds", "count"),
    [
        (own_kinds, 1500),
        (child_kinds, 2000),
        pytest.param(own_kinds, 100_000, marks=[pytest.mark.nightly, pytest.mark.timeout(1800)]),
        pytest.param(child_kinds, 5000, marks=[pytest.mark.nightly, pytest.mark.timeout(1800)]),
    ],
)
def test_changed_files_are_read_or_refused_by_name(kinds, count):
    with closing(DecoderProcess(4 * MEMORY_BYTES)) as decoder:
        verdicts = fuzz(kinds(decoder), 7, count)
        assert sum(verdicts.values()) == count
        assert verdicts[".npz read"]
        if kinds is child_kinds:
            assert verdicts[".npz BadFile"] > count // 100
            assert decoder.num_started <= 1 + count // 100  # hostile files seldom end it
        else:
            assert verdicts[".toml SettingError"] > count // 100
