"""`python -m fleetune.tools.docs.pictures`: draw README's pictures from a real run of the demo.

Run it by hand in the repository and commit the files in docs/pictures. It takes as long as `make demo`.
"""

import shutil
import sys
import tempfile
from pathlib import Path

from fleetune.tools.docs.terminal import animated, frames, recorded, spread

PICTURES = Path("docs") / "pictures"
COLUMNS, LINES = 96, 15
FRAMES, SECONDS_A_FRAME = 10, 0.9
METHOD, CHART = "fedspu", "accuracy-by-uplink.png"


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        output = recorded([sys.executable, "-P", "-m", "fleetune.tools.demo"], place, COLUMNS, LINES + 5)
        screens = spread(frames(output, METHOD), FRAMES)
        PICTURES.mkdir(exist_ok=True)
        picture = animated(screens, COLUMNS, LINES, "edge-coordinator serve", SECONDS_A_FRAME)
        (PICTURES / "live.svg").write_text(picture, encoding="utf-8")
        shutil.copy(place / "runs" / "demo" / CHART, PICTURES / f"demo-{CHART}")
    print(output[output.rindex("what each device gained") :])


if __name__ == "__main__":
    main()
