"""summary.json as scripts read it: the same keys in the same order, whatever is known."""

import json
from types import SimpleNamespace

import msgspec
import pytest
from msgspec import Struct
from msgspec.structs import replace
from tests.conftest import tiny_spec
from tests.fleet.test_semi_asynchronous import settings

from fleetune.coordinator.metrics.summarise import summarise
from fleetune.coordinator.metrics.summary import Summary, encoded, read_summary
from fleetune.coordinator.rounds.records import Ledger
from fleetune.protocols.errors import StoreError
from fleetune.tools.simulator.runner import simulate


class Spec(Struct):
    """All that a summary says of a model's spec."""

    name: str
    num_parameters: int


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    """What a summary is made of, of a simulated run of two rounds, and its summary.json."""
    folder = tmp_path_factory.mktemp("summary") / "run"
    run, summary = simulate(settings(rounds=2), folder, workers=0, fresh=True)
    state = run.controller.engine_state
    found = SimpleNamespace(
        settings=run.settings,
        records=run.controller.records(),
        ledger=run.controller.ledger,
        counters=state.counters,
        reports={device: member.report for device, member in state.members.items()},
        simulated=True,
        parameters=run.enrolment.spec.num_parameters,
        summary=encoded(msgspec.structs.replace(summary, provenance=msgspec.UNSET)).decode(),
    )
    run.store.close()
    return found


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


def test_keys_are_there_whether_anything_is_known_or_not(kept):
    bare = summary_of(kept, records=[])
    told, known = json.loads(msgspec.json.encode(bare)), json.loads(kept.summary)
    assert list(told) == list(known)
    assert told["predicted_vs_actual"] is told["joules"] is told["accuracy"]["personal_mean"] is None
    for part in ("accuracy", "bytes", "seconds"):
        assert list(told[part]) == list(known[part])
    assert [list(row) for row in told["by_device"].values()] == [
        list(row) for row in known["by_device"].values()
    ]


def test_a_summary_is_read_and_written_alike(kept):
    read = msgspec.json.decode(kept.summary, type=Summary)
    assert read == summary_of(kept)
    assert encoded(read).decode() == kept.summary


def test_what_is_no_summary_is_refused_not_half_read(kept, tmp_path):
    for wrong in ("[]", kept.summary[:-9], kept.summary.replace('"up": ', '"up": "much", "x": ')):
        (tmp_path / "summary.json").write_text(wrong)
        with pytest.raises(StoreError, match="is damaged"):
            read_summary(tmp_path)


def test_shares_are_of_as_many_whole_models(kept):
    num_bytes = summary_of(kept).bytes
    assert num_bytes.share_up == num_bytes.up / num_bytes.up_dense
    assert num_bytes.share_down == num_bytes.down / num_bytes.down_dense
    nothing = summarise(kept.settings, tiny_spec(), [], Ledger(), {}, simulated=False).bytes
    assert nothing.share_up is nothing.share_down is None
    assert replace(nothing, up_dense=4, up=1).share_up == 0.25
