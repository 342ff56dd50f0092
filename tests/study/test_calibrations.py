"""Calibrations are kept beside the studies, a file for each device as it was."""

from autotune.records.calibration import Calibration, Rate
from autotune.study.calibrations import keep, kept, path_of

MEASURED = Calibration(
    rates=(Rate(work="matmul", arithmetic="bf16", sizes=(64, 128), flops_per_s=(1e9, 2e9), failure="no answer"),),
    bytes_per_s=1e10,
    of={"device": "cpu", "threads": "1"},
)


def test_what_is_kept_is_read_again_for_the_same_device_alone(tmp_path):
    keep(path_of(tmp_path, MEASURED.of), MEASURED)
    assert kept(path_of(tmp_path, dict(reversed(MEASURED.of.items())))) == MEASURED
    assert kept(path_of(tmp_path, {**MEASURED.of, "threads": "2"})) is None


def test_a_broken_file_counts_as_none(tmp_path):
    path = path_of(tmp_path, {})
    path.parent.mkdir()
    for content in ("{", "[]", '{"rates": 3}'):
        path.write_text(content)
        assert kept(path) is None


def test_a_folder_that_cannot_be_written_is_no_error(tmp_path):
    (tmp_path / "file").write_text("")
    keep(path_of(tmp_path / "file", {}), MEASURED)
