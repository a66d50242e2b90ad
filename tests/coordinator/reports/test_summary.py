"""summary.json as scripts read it: the same keys in the same order as ever, and older files are read."""

import json
import lzma
from statistics import fmean

import msgspec
import pytest
from msgspec import Struct
from msgspec.structs import replace
from tests.conftest import tiny_spec
from tests.helpers.places import ROOT

from fleetune.coordinator.metrics.personal_scores import (
    gains,
    personal,
    prediction_rows,
    ratio_of,
    with_personal,
)
from fleetune.coordinator.metrics.summary import Summary, encoded, read_summary
from fleetune.coordinator.reports.report import figures
from fleetune.coordinator.reports.summarise import summarise
from fleetune.coordinator.rounds.records import Ledger, RoundRecord
from fleetune.protocols.method.choice import DeviceReport
from fleetune.protocols.settings.run_settings import RunSettings


class Kept(Struct):
    """What tests/data/make_summary.py kept of a run of commit 6e33d00."""

    settings: RunSettings
    records: list[RoundRecord]
    ledger: Ledger
    counters: dict[str, int]
    reports: dict[str, DeviceReport]
    simulated: bool
    parameters: int
    summary: str


class Spec(Struct):
    """All that a summary says of a model's spec."""

    name: str
    num_parameters: int


@pytest.fixture(scope="module")
def kept():
    data = lzma.decompress((ROOT / "tests/data/summary-6e33d00.json.xz").read_bytes())
    return msgspec.json.decode(data, type=Kept)


def today(kept):
    """The kept summary as it is written today: the virtual clock's seconds under a name of their own."""
    told = json.loads(kept.summary)
    told["seconds"] |= {"wall": None, "virtual": told["seconds"]["wall"]}
    return json.dumps(told, indent=2, ensure_ascii=False) + "\n"


def summary_of(kept, records=None):
    return summarise(
        kept.settings,
        Spec(kept.settings.model.name, kept.parameters),
        kept.records if records is None else records,
        kept.ledger,
        kept.counters,
        reports=kept.reports,
        simulated=kept.simulated,
    )


def test_the_same_run_has_the_same_summary_to_the_byte(kept):
    assert figures(summary_of(kept), kept.records)["summary.json"].decode() == today(kept)


def test_keys_are_there_whether_anything_is_known_or_not(kept):
    bare = summary_of(kept, records=[])
    told, known = json.loads(msgspec.json.encode(bare)), json.loads(today(kept))
    assert list(told) == list(known)
    assert told["predicted_vs_actual"] is told["joules"] is told["accuracy"]["personal_mean"] is None
    for part in ("accuracy", "bytes", "seconds"):
        assert list(told[part]) == list(known[part])
    assert [list(row) for row in told["by_device"].values()] == [
        list(row) for row in known["by_device"].values()
    ]


def test_a_summary_is_read_and_written_alike(kept):
    read = msgspec.json.decode(today(kept), type=Summary)
    assert read == summary_of(kept)
    assert figures(read, [])["summary.json"].decode() == today(kept)


def test_an_older_summary_is_read_under_todays_names(kept, tmp_path):
    """`seconds.wall` of a simulation was the virtual clock; a mean over all devices was the headline."""
    old = json.loads(kept.summary)
    last = list(old["by_device"])[-1]
    old["by_device"][last] |= {"updates": 0, "personal": 0.05}
    scores = [row["personal"] for row in old["by_device"].values()]
    old["accuracy"] |= {"personal_mean": fmean(scores), "personal_weighted": 0.5}
    (tmp_path / "summary.json").write_text(json.dumps(old))
    read = read_summary(tmp_path)
    assert (read.seconds.wall, read.seconds.virtual) == (None, old["seconds"]["wall"])
    assert read.accuracy.personal_mean == pytest.approx(fmean(scores[:-1]))
    assert (read.accuracy.personal_mean_all, read.accuracy.personal_weighted_all) == (fmean(scores), 0.5)
    assert read.who_took_part == f"{len(scores) - 1} of {len(scores)} devices took part"
    (tmp_path / "summary.json").write_bytes(encoded(read))
    assert read_summary(tmp_path) == read


LATER = {  # keys that older releases did not write
    "": ("ratios", "joules", "predicted_vs_actual", "turned_away"),
    "accuracy": ("kept_mean", "kept_weighted"),
    "device": ("ratio", "kept", "reason", "predicted_s", "actual_s", "joules"),
}


def test_an_older_summary_without_later_keys_and_with_strange_ones_is_read(kept):
    old = json.loads(kept.summary) | {"strange": [1]}
    for key in LATER[""]:
        del old[key]
    for key in LATER["accuracy"]:
        del old["accuracy"][key]
    for row in old["by_device"].values():
        for key in LATER["device"]:
            del row[key]
    read = msgspec.json.decode(json.dumps(old), type=Summary)
    whole = msgspec.json.decode(kept.summary, type=Summary)
    assert personal(read) == personal(whole)
    assert set(gains(read, whole).values()) == {0.0}
    assert read.bytes == whole.bytes
    assert ratio_of(read, "device-0") is None
    assert ratio_of(read, "nobody") is None
    assert prediction_rows(read) == []
    assert with_personal(read, kept.records) == read


def test_what_is_no_summary_is_refused_not_half_read(kept):
    for wrong in ("{}", "[]", kept.summary[:-9], kept.summary.replace('"up": ', '"up": "much", "x": ')):
        with pytest.raises(msgspec.MsgspecError):
            msgspec.json.decode(wrong, type=Summary)


def test_shares_are_of_as_many_whole_models(kept):
    num_bytes = summary_of(kept).bytes
    assert num_bytes.share_up == num_bytes.up / num_bytes.up_dense
    assert num_bytes.share_down == num_bytes.down / num_bytes.down_dense
    nothing = summarise(kept.settings, tiny_spec(), [], Ledger(), {}, simulated=False).bytes
    assert nothing.share_up is nothing.share_down is None
    assert replace(nothing, up_dense=4, up=1).share_up == 0.25
