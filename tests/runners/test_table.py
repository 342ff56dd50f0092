"""A recorded table: what is written is what is read, and what is no table is refused with the reason."""

from __future__ import annotations

import json
import math
import random
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest

from autotune.files import mend
from autotune.records.config import Config, World
from autotune.records.outcome import Bound, Kind, Outcome
from autotune.runners import table
from autotune.runners.table import Header, Row, TableError, figures_of
from autotune.techniques import find_techniques
from tests.closed_form import measurement

techniques = find_techniques()

CHOICES = {
    "batch_size": (4, 8),
    "accumulation_steps": (6, 12),
    **{name: (technique.off,) for name, technique in techniques.items()},
    "amp": ("off", "bf16"),
    "channels_last": (False, True),
}
HEADER = Header(
    task="closed",
    source_hash="abc",
    num_parameters=10,
    device="cpu",
    model="a processor",
    num_threads=1,
    total_bytes=2**34,
    memory_limit_bytes=2**33,
    outside_bytes=2**28,
    driver="",
    torch="2.13.0",
    autotune="0.1.0",
    global_batch=48,
    baseline=techniques.complete({"batch_size": 4}, global_batch=48).as_dict(),
    choices=CHOICES,
    seed=0,
    max_timed_s=0.5,
    max_warmup_s=1.0,
    date="2026-01-01T00:00:00+00:00",
)


def config(**choices: object) -> Config:
    return techniques.complete({"batch_size": 4, **choices}, global_batch=48)


def ok(which: Config, samples_per_s: float, peak_bytes: int = 10**9) -> Outcome:
    phases_s = {"data": 0.01, "forward": 0.02, "backward": 0.03, "optimizer": 0.004}
    return Outcome(
        kind=Kind.OK, measurement=replace(measurement(which, samples_per_s, peak_bytes), phases_s=phases_s), wall_s=1.5
    )


def written(folder: Path, *rows: Row) -> Path:
    path = folder / "closed.csv"
    table.start(path, HEADER)
    for row in rows:
        table.append(path, HEADER, row)
    return path


def test_rows_come_back_as_they_were_written(tmp_path: Path) -> None:
    failed = Outcome(kind=Kind.OOM, cause='no memory, "none"', wall_s=0.5, train_s=0.1, peak_bytes=5, attempted_bytes=7)
    first, second = config(amp="bf16", channels_last=True), config(batch_size=8)
    path = written(
        tmp_path, Row(config=first, repeat=0, outcome=ok(first, 100.0)), Row(config=second, repeat=1, outcome=failed)
    )
    found = table.read(path, find_techniques())
    assert found.header == HEADER
    assert [(row.config, row.repeat) for row in found.rows] == [(first, 0), (second, 1)]
    assert found.rows[1].outcome == failed
    measured = found.rows[0].outcome.measurement
    assert measured is not None and measured.phases_s["backward"] == 0.03
    assert (measured.samples_per_s, measured.peak_bytes, measured.step_s) == (100.0, 10**9, 0.48)


def test_energy_comes_back_and_a_table_that_lacks_some_says_so(tmp_path: Path) -> None:
    counted = ok(config(), 100.0)
    assert counted.measurement is not None
    counted = replace(counted, measurement=replace(counted.measurement, joules_per_sample=1.25))
    path = written(tmp_path, Row(config=config(), repeat=0, outcome=counted))
    found = table.read(path, find_techniques())
    assert found.rows[0].outcome.measurement is not None
    assert (found.rows[0].outcome.measurement.joules_per_sample, found.no_energy) == (1.25, "")
    table.append(path, HEADER, Row(config=config(amp="bf16"), repeat=0, outcome=ok(config(amp="bf16"), 90.0)))
    assert "holds no energy of 1 of its configs; record it again" in table.read(path, find_techniques()).no_energy


def test_an_older_table_without_energy_is_read_and_added_to(tmp_path: Path) -> None:
    path = written(tmp_path)
    path.write_text(path.read_text().replace(",joules_per_sample", ""))
    counted = ok(config(), 100.0)
    assert counted.measurement is not None
    counted = replace(counted, measurement=replace(counted.measurement, joules_per_sample=1.25))
    table.append(path, HEADER, Row(config=config(), repeat=0, outcome=counted))
    found = table.read(path, find_techniques()).rows[0].outcome.measurement
    assert found is not None and (found.samples_per_s, found.joules_per_sample) == (100.0, None)


def test_the_bound_that_a_killed_probe_left_comes_back(tmp_path: Path) -> None:
    bound = Bound(samples_per_s_high=12.5, peak_bytes_low=7)
    killed = Outcome(kind=Kind.TIMEOUT, cause="killed after 60 s", wall_s=60.0, train_s=50.0, bound=bound)
    path = written(tmp_path, Row(config=config(), repeat=0, outcome=killed))
    assert table.read(path, find_techniques()).rows[0].outcome == killed


def test_a_table_of_format_1_opens(tmp_path: Path) -> None:
    path = written(tmp_path, Row(config=config(), repeat=0, outcome=ok(config(), 90.0)))
    magic, metadata, *rows = path.read_text().splitlines(keepends=True)
    old = json.loads(metadata.removeprefix("# "))
    for name in ("capability", "baseline_given", "reasons", "notes", "facts"):
        del old[name]
    path.write_text("".join([magic.replace("format 2", "format 1"), f"# {json.dumps(old)}\n", *rows]))
    assert table.read(path, find_techniques()).header == HEADER


def test_a_table_of_a_later_format_is_refused_with_the_way_out(tmp_path: Path) -> None:
    path = written(tmp_path)
    path.write_text(path.read_text().replace("format 2", "format 3"))
    with pytest.raises(TableError, match=r"has format 3, and .* up to 2; upgrade it"):
        table.read(path, find_techniques())


def test_what_a_table_says_of_techniques_that_came_later_is_that_they_were_off(tmp_path: Path) -> None:
    choices = {name: options for name, options in HEADER.choices.items() if name != "prefetch_factor"}
    header = replace(HEADER, choices=choices)
    table.start(tmp_path / "old.csv", header)
    table.append(tmp_path / "old.csv", header, Row(config=config(), repeat=0, outcome=ok(config(), 90.0)))
    found = table.read(tmp_path / "old.csv", find_techniques())
    assert found.rows[0].config == config()
    assert found.header.inspection(find_techniques()).support["prefetch_factor"].choices == (
        config()["prefetch_factor"],
    )


def test_pandas_reads_a_table_as_a_plain_csv_file(tmp_path: Path) -> None:
    path = written(tmp_path, Row(config=config(), repeat=0, outcome=ok(config(), 100.0)))
    frame = pd.read_csv(path, comment="#")
    assert frame.loc[0, ["batch_size", "accumulation_steps", "amp", "samples_per_s"]].tolist() == [4, 12, "off", 100.0]


def test_a_configs_figure_is_the_geometric_mean_with_the_interval_of_the_tables_noise(tmp_path: Path) -> None:
    speeds = [(90.0, 5), (100.0, 7), (111.1, 6)]
    rows = [Row(config=config(), repeat=i, outcome=ok(config(), *speed)) for i, speed in enumerate(speeds)]
    steady = [config(amp="bf16"), config(batch_size=8), config(channels_last=True)]  # so that the rounds are alike
    rows += [Row(config=which, repeat=i, outcome=ok(which, 50.0)) for which in steady for i in range(3)]
    figure = table.read(written(tmp_path, *rows), find_techniques()).figures[config()]
    assert figure.samples_per_s == pytest.approx((90 * 100 * 111.1) ** (1 / 3))
    assert figure.half_width == pytest.approx(1.96 * 0.1053 / math.sqrt(4) / math.sqrt(3), rel=0.01)
    assert (figure.kind, figure.peak_bytes, figure.num_repeats) == (Kind.OK, 7, 3)


def test_the_interval_covers_the_true_figure_about_95_percent_of_the_time(tmp_path: Path) -> None:
    generator = random.Random(1)
    rows = [
        Row(config=which, repeat=i, outcome=ok(which, 100 * math.exp(generator.gauss(0, 0.05))))
        for which in (config(prefetch_factor=number) for number in range(2, 302))
        for i in range(5)
    ]
    figures = figures_of(rows).values()
    covered = sum(abs(math.log(figure.samples_per_s / 100)) <= figure.half_width for figure in figures)
    assert covered / len(figures) >= 0.92


def test_what_a_whole_round_was_slower_by_is_no_noise(tmp_path: Path) -> None:
    configs = [config(), config(amp="bf16"), config(batch_size=8)]
    rows = [
        Row(config=which, repeat=number, outcome=ok(which, speed * slower))
        for number, slower in enumerate((1.0, 0.8, 1.0))
        for which, speed in zip(configs, (100.0, 150.0, 50.0), strict=True)
    ]
    figures = table.read(written(tmp_path, *rows), find_techniques()).figures
    assert all(figure.half_width < 1e-4 for figure in figures.values())
    assert figures[configs[1]].samples_per_s / figures[configs[0]].samples_per_s == pytest.approx(1.5, rel=1e-4)


def test_a_config_that_failed_once_counts_as_failed(tmp_path: Path) -> None:
    oom = Outcome(kind=Kind.OOM, cause="no memory", peak_bytes=9)
    rows = [Row(config=config(), repeat=0, outcome=ok(config(), 90.0)), Row(config=config(), repeat=1, outcome=oom)]
    figure = table.read(written(tmp_path, *rows), find_techniques()).figures[config()]
    assert (figure.kind, figure.samples_per_s) == (Kind.OOM, 0.0)


def test_a_last_line_that_was_cut_short_is_left_out(tmp_path: Path) -> None:
    rows = [Row(config=config(), repeat=i, outcome=ok(config(), 90.0)) for i in range(2)]
    path = written(tmp_path, *rows)
    path.write_text(path.read_text()[:-20])
    assert len(table.read(path, find_techniques()).rows) == 1


@pytest.mark.parametrize("lost", [1, 20])
def test_what_is_appended_after_a_line_that_was_cut_short_stands_by_itself(tmp_path: Path, lost: int) -> None:
    rows = [Row(config=config(), repeat=i, outcome=ok(config(), 90.0)) for i in range(3)]
    path = written(tmp_path, *rows[:2])
    path.write_text(path.read_text()[:-lost])
    mend(path)
    table.append(path, HEADER, rows[2])
    assert [row.repeat for row in table.read(path, find_techniques()).rows] == [0, 2]


def test_an_older_table_with_a_column_that_is_gone_is_read_and_added_to(tmp_path: Path) -> None:
    rows = [
        Row(config=config(batch_size=size), repeat=0, outcome=ok(config(batch_size=size), 100.0)) for size in (4, 8)
    ]
    path = written(tmp_path, *rows)
    lines = path.read_text().splitlines()
    older = [lines[0], lines[1], lines[2].replace("num_steps,", "num_steps,num_shapes,")]
    position = lines[2].split(",").index("num_steps") + 1
    for line in lines[3:]:
        cells = line.split(",")
        older.append(",".join([*cells[:position], "7", *cells[position:]]))
    path.write_text("\n".join(older) + "\n")
    table.append(path, HEADER, rows[1])
    assert [row.config for row in table.read(path, find_techniques()).rows] == [row.config for row in (*rows, rows[1])]
    assert {
        row.outcome.measurement.peak_bytes
        for row in table.read(path, find_techniques()).rows
        if row.outcome.measurement
    } == {10**9}


def test_differences_name_what_changed_and_forgive_the_date() -> None:
    other = replace(HEADER, torch="2.14.0", date="2027-01-01T00:00:00+00:00")
    assert HEADER.differences(other) == ["torch was '2.13.0' and is '2.14.0'"]


def test_a_table_that_does_not_say_what_always_acts_is_gone_on_with(tmp_path: Path) -> None:
    now = replace(HEADER, always={"attention": ("cudnn",)})
    older = {key: value for key, value in now.to_dict().items() if key != "always"}
    assert Header.from_dict(older).always == {}
    assert Header.from_dict(older).differences(now) == []
    assert Header.from_dict(json.loads(json.dumps(now.to_dict()))) == now


def test_a_machine_whose_kernel_keeps_a_page_more_is_the_same_and_one_of_half_the_memory_is_not() -> None:
    assert HEADER.differences(replace(HEADER, total_bytes=2**34 - 4096)) == []
    assert HEADER.differences(replace(HEADER, total_bytes=2**33)) == [f"total_bytes was {2**34} and is {2**33}"]


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("", "is not a recorded table"),
        ("batch_size,amp\n4,off\n", "'batch_size,amp'"),
        (table.MAGIC + "\n", "not a table's metadata"),
        (table.MAGIC + '\n# {"task": "gpt"}\n', "not a table's metadata (TypeError"),
        (table.MAGIC + "\n# no json\n", "not a table's metadata"),
        (f"{table.MAGIC}\n# {json.dumps(HEADER.to_dict())}\nbatch_size,amp\n", "no column 'accumulation_steps'"),
    ],
)
def test_what_is_no_table_is_refused_with_the_reason(tmp_path: Path, content: str, expected: str) -> None:
    path = tmp_path / "some.csv"
    path.write_text(content)
    with pytest.raises(TableError) as caught:
        table.read(path, find_techniques())
    assert expected in str(caught.value) and str(path) in str(caught.value)


def test_a_row_that_is_no_probe_is_named_by_its_line(tmp_path: Path) -> None:
    path = written(tmp_path, Row(config=config(), repeat=0, outcome=ok(config(), 90.0)))
    path.write_text(path.read_text().replace(",off,", ",fp8,"))
    with pytest.raises(TableError, match="line 4"):
        table.read(path, find_techniques())


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(TableError, match=r"nowhere\.csv"):
        table.read(tmp_path / "nowhere.csv", find_techniques())


def test_a_table_of_several_processes_counts_the_samples_of_all(tmp_path: Path) -> None:
    header = replace(HEADER, world=World(size=2))
    which = techniques.complete({"batch_size": 4}, global_batch=48, world=header.world)
    table.start(tmp_path / "two.csv", header)
    table.append(tmp_path / "two.csv", header, Row(config=which, repeat=0, outcome=ok(which, 96.0)))
    found = table.read(tmp_path / "two.csv", find_techniques())
    outcome = found.rows[0].outcome
    assert found.header == header and outcome.world == header.world
    assert outcome.measurement is not None and outcome.measurement.step_s == 0.5  # 48 samples, 24 of each process
