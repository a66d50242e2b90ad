"""Whatever devices, runs and methods are called, every text of every picture lies inside it."""

import msgspec
import pytest
from matplotlib import rc_context
from matplotlib.text import Text
from msgspec.structs import replace
from tests.coordinator.reports.test_report import predicted_records, shown, summary_of
from tests.helpers.nightly import sooner
from tests.tools.compare.test_compare import hand_made, side_by_side

from fleetune.coordinator.metrics.adoption import adoption_over
from fleetune.coordinator.metrics.readable import MOST_LETTERS, clip
from fleetune.coordinator.metrics.summary import DeviceAdoption
from fleetune.coordinator.reports.pictures.plots import Story, draw
from fleetune.coordinator.reports.pictures.theme import SETTINGS
from fleetune.coordinator.reports.tables import device_table, run_table
from fleetune.coordinator.store.run_folder import PICTURES
from fleetune.tools.compare import plots

LONG = "measurements-of-greenhouse-number-7-north-east-corner-with-fans-"
UNBROKEN = "temperature_" * 5 + "and4"
NAMES = {"short": "dev", "long": LONG, "one word": UNBROKEN}


def story(num_devices, name, rival):
    """A run of devices of such a name, and its rival."""
    names = {}

    def renamed(record):
        devices = {names.setdefault(old, f"{len(names):02d}-{name}"[:64]): one for old, one in by(record)}
        return msgspec.structs.replace(record, devices=devices, participants=tuple(devices))

    def by(record):
        return record.devices.items()

    records = [renamed(record) for record in predicted_records(num_devices, lift=0.1)]
    worse = [renamed(record) for record in predicted_records(num_devices)]
    return Story(summary_of(records), records, {rival: summary_of(worse, "fedavg")})


def with_adoption(summary):
    """As a run with [adoption] leaves it: gains around 0, every second device serves the fleet's model."""
    rows = {
        device: msgspec.structs.replace(
            row, adoption=DeviceAdoption(index % 2 == 0, 0.5, 0.02 * index - 0.1, 0.03)
        )
        for index, (device, row) in enumerate(summary.by_device.items())
    }
    found = adoption_over([row.adoption for row in rows.values()])
    return msgspec.structs.replace(summary, by_device=rows, adoption=found)


def texts_outside(figure):
    """What stands beyond the figure's edges as it is saved."""
    drawn, draw_text = [], Text.draw

    def noted(text, renderer):
        drawn.append(text)
        draw_text(text, renderer)

    with rc_context(SETTINGS), pytest.MonkeyPatch.context() as patch:
        patch.setattr(Text, "draw", noted)  # ticks beyond the axes have labels that nobody draws
        figure.draw_without_rendering()
        boxes = [(text.get_text(), text.get_window_extent()) for text in drawn if text.get_text().strip()]
    assert boxes
    return [(content, box) for content, box in boxes if not is_within(box, figure.bbox)]


def is_within(box, whole):
    return box.x0 >= 0 and box.y0 >= 0 and box.x1 <= whole.width and box.y1 <= whole.height


@pytest.mark.parametrize("num_devices", sooner([3, 40], kept=[40]))
@pytest.mark.parametrize("name", NAMES.values(), ids=NAMES)
def test_every_text_of_a_runs_pictures_is_inside(name, num_devices):
    told = story(num_devices, name, (name + LONG)[:64])
    figures = draw(told)
    assert set(figures) == set(PICTURES)
    assert {key: found for key, figure in figures.items() if (found := texts_outside(figure))} == {}


@pytest.mark.parametrize("name", NAMES.values(), ids=NAMES)
def test_every_text_of_a_comparisons_pictures_is_inside(name):
    labels = [f"{index}-{name}"[:64] for index in range(4)]
    runs = [hand_made(label=label) for label in labels]
    figures = plots.draw(side_by_side(*runs))
    assert {key: found for key, figure in figures.items() if (found := texts_outside(figure))} == {}


def test_a_name_is_clipped_where_it_says_so():
    assert clip("a" * MOST_LETTERS) == "a" * MOST_LETTERS
    assert clip("a" * (MOST_LETTERS + 1)) == "a" * (MOST_LETTERS - 1) + "…"


@pytest.mark.parametrize("adoption", [False, True])
@pytest.mark.parametrize("rivals", [0, 1])
@pytest.mark.parametrize("name", NAMES.values(), ids=NAMES)
def test_a_table_of_80_characters_cuts_no_name(name, rivals, adoption):
    told = story(3, name, "local-only")
    rows = told.summary.by_device
    for device, row in rows.items():
        rows[device] = replace(row, num_samples=12345, deployed=0.912, up=123_456_789, down=123_456_789)
    boards = dict.fromkeys(told.summary.by_device, "jetson-orin-nano-super-8gb")
    summary = with_adoption(told.summary) if adoption else told.summary
    printed = shown(device_table(summary, told.rivals if rivals else {}, boards=boards), width=80)
    assert ("over" in printed) == adoption
    lines = printed.splitlines()
    assert max(map(len, lines)) <= 80
    assert "…" not in printed
    end = next(line for line in lines if "board" in line).index("board")
    assert end >= 8, "a name of 64 letters in a dozen lines is no table"
    names = "".join(line[:end].strip() for line in lines if not line.startswith("─"))
    assert all(device in names for device in told.summary.by_device)
    assert "1 min" in shown(run_table(told.summary, told.rivals))
    assert "fedspu" in shown(run_table(told.summary, told.rivals))


def test_what_is_served_is_shown_where_it_is_not_the_accuracy():
    summary = story(3, "dev", "local-only").summary
    rows = summary.by_device
    rows.update({device: replace(row, deployed=row.personal) for device, row in rows.items()})
    assert "deployed" not in shown(device_table(summary))
    device = next(iter(rows))
    rows[device] = replace(rows[device], deployed=0.999)
    assert "deployed" in shown(device_table(summary))
    assert "99.9 %" in shown(device_table(summary))
