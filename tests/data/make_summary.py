"""Make a summary.json and what it is made from, with the code of the release that stands first in PYTHONPATH.

    git archive 6e33d00 | tar x -C /tmp/old
    PYTHONPATH=/tmp/old python -P tests/data/make_summary.py tests/data/summary-6e33d00.json.xz

A simulated run of three devices that choose their ratios; refusals are added by hand, no simulation has them.
"""

import lzma
import sys
import tempfile
from pathlib import Path

import msgspec

from fleetune.coordinator.reports.report import figures
from fleetune.coordinator.reports.summarise import summarise
from fleetune.protocols.settings.run_toml import parse_run
from fleetune.tools.simulator.runner import simulate

SECTIONS = {
    "run": {"name": "old", "rounds": 6, "seed": 5},
    "model": {"name": "mlp"},
    "method": {"name": "fedspu"},
    "data": {"partition": {"kind": "dirichlet", "samples": 60, "test_fraction": 0.5}},
    "training": {"batch_size": 10, "learning_rate": 0.1},
    "round": {"deadline_s": 30},
    "fleet": {"devices": 3, "boards": {"raspberry-pi-4b": 1, "raspberry-pi-zero-2w": 2}},
}


def main(archive: Path) -> None:
    with tempfile.TemporaryDirectory() as folder:
        run, _ = simulate(parse_run(SECTIONS), Path(folder) / "old", workers=0, fresh=True)
        engine, ledger = run.controller.engine.state, run.controller.ledger
        ledger.refusals.update({"late": 3, "PacketCorrupt": 1})
        ledger.turned_away["device-2"] = {"PacketOutlying": 1, "PacketCorrupt": 2}
        records, reports = run.controller.records(), {n: m.report for n, m in engine.members.items()}
        counters = {"late": 3, "gone": 0}
        told = {"ledger": ledger, "counters": counters, "reports": reports, "simulated": True}
        summary = summarise(
            run.settings, run.enrolment.spec, records, ledger, counters, reports=reports, simulated=True
        )
        run.store.close()
    kept = {
        "settings": run.settings,
        "records": records,
        **told,
        "parameters": run.enrolment.spec.num_parameters,
        "summary": figures(summary, records)["summary.json"].decode(),
    }
    archive.write_bytes(lzma.compress(msgspec.json.encode(kept)))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
