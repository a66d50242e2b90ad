"""Where time counts, masks go coded or as bitmaps by each device's speed and link; nothing else changes."""

import pytest
from tests.tools.simulator.test_simulate import BASE, settings

from fleetune.protocols.update.patch_values import PatchWriter
from fleetune.tools.simulator.runner import simulate

THIN, QUICK = 0.002, 100.0  # Mbit/s


def played(folder, monkeypatch, *, quick, up, down, boards):
    """What devices learned, and of how many masks a code was sent, up and down."""
    written, write_mask = {"up": [], "down": []}, PatchWriter.write_mask

    def counted(writer, mask):
        framed = write_mask(writer, mask)
        written["up" if writer.written is None else "down"].append(framed is not None)
        return framed

    monkeypatch.setattr(PatchWriter, "write_mask", counted)
    links = {"uplink_mbps": up, "downlink_mbps": down}
    case = {
        "method": {"name": "fedpurin"},
        "encoding": {"quick_masks": quick},
        "fleet": BASE["fleet"] | {"ratios": [0.5], "boards": boards} | links,
        "round": {"deadline_s": 1e4},
    }
    run, summary = simulate(settings(**case), folder, workers=0, fresh=True)
    weights, records = run.controller.shared_model, run.controller.records()
    scores = [[one.measures.after for one in record.devices.values()] for record in records]
    run.store.close()
    monkeypatch.undo()
    assert all(written.values())
    return (weights.tobytes(), scores), {way: sum(codes) for way, codes in written.items()}, summary.bytes


@pytest.mark.parametrize(
    ("up", "down", "coded"),
    [(THIN, THIN, ("up", "down")), (THIN, QUICK, ("up",)), (QUICK, THIN, ("down",)), (QUICK, QUICK, ())],
)
def test_a_link_decides_by_direction(up, down, coded, tmp_path, monkeypatch):
    boards = {"raspberry-pi-zero-2w": 6}
    learned, always, _ = played(tmp_path / "a", monkeypatch, quick=False, up=up, down=down, boards=boards)
    same, codes, _ = played(tmp_path / "b", monkeypatch, quick=True, up=up, down=down, boards=boards)
    assert same == learned
    for way in ("up", "down"):
        assert always[way] > 0
        assert codes[way] == (always[way] if way in coded else 0)


def test_a_board_decides_for_itself(tmp_path, monkeypatch):
    mixed = {"raspberry-pi-zero-2w": 3, "n100-gateway": 3}
    _, codes, num_bytes = played(tmp_path / "a", monkeypatch, quick=True, up=0.5, down=QUICK, boards=mixed)
    _, always, fewest = played(tmp_path / "b", monkeypatch, quick=False, up=0.5, down=QUICK, boards=mixed)
    assert 0 < codes["up"] < always["up"]
    assert num_bytes.up > fewest.up
