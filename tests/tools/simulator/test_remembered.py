"""What a simulation remembers of the last tasks and reads before it is due changes no figure."""

import numpy as np
import pytest
from tests.helpers.nightly import sooner
from tests.tools.simulator.test_checkpoint import CASES, figures
from tests.tools.simulator.test_checkpoint import wanted as asked

from fleetune.protocols.update.reference_model import ReferenceModelCache
from fleetune.protocols.update.shared_payload_cache import DecodeCache, EncodeCache
from fleetune.tools.simulator import pending_work, runner
from fleetune.tools.simulator.runner import simulate

KEPT = ("lossy both ways", "semi-asynchronous, differences", "fedpurin")


def played(case, folder):
    run, summary = simulate(asked(case, rounds=4), folder, workers=0, fresh=True)
    found = figures(run, summary)
    run.store.close()
    return found


@pytest.mark.parametrize("name", sooner(CASES, KEPT))
def test_it_ends_as_one_that_remembers_nothing(name, tmp_path, monkeypatch):
    case = CASES[name]
    remembering = played(case, tmp_path / "a")
    monkeypatch.setattr(pending_work, "_MOST_BYTES_AHEAD", 0)
    monkeypatch.setattr(ReferenceModelCache, "known", lambda _, base: base)
    monkeypatch.setattr(DecodeCache, "found", lambda _, about, data, mask, read: read())
    monkeypatch.setattr(DecodeCache, "found_mask", lambda _, data, size, read: read())
    monkeypatch.setattr(EncodeCache, "found", lambda _, around, mask, values, write: write())
    assert played(case, tmp_path / "b") == remembering


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("method fedspu", {"lossless"}),
        ("method kapc-bls", {"lossless"}),
        ("method srp-pfed", {"lossless", "mask"}),
        ("method fedpurin", {"lossless", "mask"}),
        ("semi-asynchronous", {"lossless"}),
        ("lossy both ways", set()),
    ],
)
def test_what_is_told_is_what_would_be_read(name, wanted, tmp_path, monkeypatch):
    told, found, found_mask = [], DecodeCache.found, DecodeCache.found_mask

    def held_against(reader, about, data, mask, read):
        got, values = found(reader, about, data, mask, read), reader.content and reader.content.values
        if values is not None:
            told.append(about.split()[0])
            assert got.tobytes() == read().tobytes()
            assert not np.shares_memory(got, values), "the reader may change it"
        return got

    def mask_held_against(reader, data, size, read):
        got = found_mask(reader, data, size, read)
        if reader.content is not None:
            assert data in reader.content.masks
            told.append("mask")
            assert got.tobytes() == read().tobytes()
        return got

    monkeypatch.setattr(DecodeCache, "found", held_against)
    monkeypatch.setattr(DecodeCache, "found_mask", mask_held_against)
    played(CASES[name], tmp_path)
    assert set(told) == wanted
    assert all(told.count(one) > 10 for one in wanted)


def test_workers_elsewhere_are_told_nothing_and_tell_nothing(tmp_path, monkeypatch):
    elsewhere, said, at_once = False, [], runner.Inline.submit

    def submit(executor, reply, job):
        handed = job.for_elsewhere if elsewhere else job
        done = at_once(executor, reply, handed)
        said.append((handed.content is not None, done.result().sent is not None))
        return done

    monkeypatch.setattr(runner.Inline, "submit", submit)
    near = played({}, tmp_path / "a")
    assert (True, True) in said
    said.clear()
    elsewhere = True
    assert played({}, tmp_path / "b") == near
    assert set(said) == {(False, False)}
