"""The caching allocator as a specification: requests in, blocks and segments out."""

from itertools import count

import pytest

from autotune.prediction.allocator import Settings, reserved_bytes, settings_of
from autotune.prediction.passes import Event
from autotune.units import MIB


class Program:
    """Writes a trace as a program would make it."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self._keys = count()
        self._sizes: dict[int, int] = {}

    def allocate(self, size_bytes: float) -> int:
        key = next(self._keys)
        self._sizes[key] = int(size_bytes)
        self.events.append(Event(key, int(size_bytes), True))
        return key

    def free(self, *keys: int) -> None:
        self.events += [Event(key, self._sizes[key], False) for key in keys]

    @property
    def reserved_mib(self) -> float:
        return reserved_bytes(self.events) / MIB


@pytest.fixture
def program() -> Program:
    return Program()


@pytest.mark.parametrize(("request_bytes", "num_blocks"), [(1, 4096), (512, 4096), (513, 2048), (MIB - 1, 2)])
def test_requests_are_rounded_up_to_512_bytes(program: Program, request_bytes: int, num_blocks: int) -> None:
    for _ in range(num_blocks):
        program.allocate(request_bytes)
    assert program.reserved_mib == 2
    program.allocate(request_bytes)
    assert program.reserved_mib == 4


@pytest.mark.parametrize(
    ("request_mib", "segment_mib"), [(0.001, 2), (1, 2), (1.001, 20), (9.9, 20), (10, 10), (10.5, 12), (33, 34)]
)
def test_the_segment_depends_on_the_request(program: Program, request_mib: float, segment_mib: int) -> None:
    program.allocate(request_mib * MIB)
    assert program.reserved_mib == segment_mib


def test_storages_without_bytes_take_no_memory(program: Program) -> None:
    program.free(program.allocate(0))
    assert program.reserved_mib == 0


def test_small_requests_share_a_segment(program: Program) -> None:
    for _ in range(4096):
        program.allocate(512)
    assert program.reserved_mib == 2
    program.allocate(512)
    assert program.reserved_mib == 4


def test_a_small_request_does_not_use_the_large_pool(program: Program) -> None:
    program.allocate(2 * MIB)
    program.allocate(MIB)
    assert program.reserved_mib == 20 + 2


def test_medium_requests_share_a_segment_of_20_mib(program: Program) -> None:
    for _ in range(4):
        program.allocate(5 * MIB)
    assert program.reserved_mib == 20
    program.allocate(5 * MIB)
    assert program.reserved_mib == 40


def test_a_rest_of_up_to_1_mib_stays_with_its_large_block(program: Program) -> None:
    program.free(program.allocate(12 * MIB))
    program.allocate(11 * MIB)
    assert program.reserved_mib == 12
    program.allocate(1.5 * MIB)
    assert program.reserved_mib == 12 + 20


def test_a_rest_of_more_than_1_mib_is_split_off_and_used(program: Program) -> None:
    program.free(program.allocate(14 * MIB))
    program.allocate(12 * MIB)
    program.allocate(2 * MIB)
    assert program.reserved_mib == 14


def test_a_freed_block_is_used_again(program: Program) -> None:
    for _ in range(3):
        program.free(program.allocate(30 * MIB))
    assert program.reserved_mib == 30


def test_the_smallest_block_that_is_large_enough_is_taken(program: Program) -> None:
    large, small = program.allocate(60 * MIB), program.allocate(40 * MIB)
    program.free(large, small)
    program.allocate(40 * MIB)  # from the 40 MiB, so that 60 MiB stay whole
    program.allocate(60 * MIB)
    assert program.reserved_mib == 100


def test_of_equal_blocks_the_one_at_the_lowest_address_is_taken(program: Program) -> None:
    first, second, third = (program.allocate(6 * MIB) for _ in range(3))
    program.free(third, first)  # [6 free][6 second][6 and 2 free]
    assert program.reserved_mib == 20
    program.allocate(6 * MIB)  # the one of exactly 6 MiB, at the front
    program.free(second)  # and so 14 MiB in a row
    program.allocate(14 * MIB)
    assert program.reserved_mib == 20


def test_free_neighbours_become_one_block(program: Program) -> None:
    blocks = [program.allocate(5 * MIB) for _ in range(4)]
    program.free(blocks[0], blocks[2], blocks[1], blocks[3])  # joined with what is behind, before, and both
    program.allocate(20 * MIB)
    assert program.reserved_mib == 20


def test_free_blocks_of_different_segments_do_not_become_one(program: Program) -> None:
    program.free(*[program.allocate(20 * MIB) for _ in range(2)])
    program.allocate(40 * MIB)
    assert program.reserved_mib == 80


def test_a_living_block_between_free_ones_keeps_them_apart(program: Program) -> None:
    blocks = [program.allocate(6 * MIB) for _ in range(3)]
    program.free(blocks[0], blocks[2])
    program.allocate(12 * MIB)
    assert program.reserved_mib == 20 + 12


def test_segments_are_kept(program: Program) -> None:
    program.free(program.allocate(30 * MIB), program.allocate(20 * MIB))
    program.allocate(2 * MIB)
    assert program.reserved_mib == 50


def test_freeing_what_was_allocated_before_the_trace_changes_nothing() -> None:
    assert reserved_bytes([Event(1, 100, False)]) == 0


def test_the_environments_settings_are_read_and_others_added() -> None:
    given = {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64,expandable_segments:False, roundup_power2_divisions:8"}
    assert settings_of(given) == Settings(max_split_bytes=64 * MIB, divisions=8)
    added = settings_of(given, "expandable_segments:True")
    assert added == Settings(expandable=True, max_split_bytes=64 * MIB, divisions=8)
    assert settings_of({}) == Settings()


def test_an_expandable_segment_grows_by_what_is_missing(program: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = program.allocate(100 * MIB), program.allocate(30 * MIB)
    program.free(first, second)
    program.allocate(135 * MIB)
    assert program.reserved_mib == 100 + 30 + 136
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    assert program.reserved_mib == 140


def test_a_hole_in_an_expandable_segment_is_used_and_its_end_found_again(
    program: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    first, second, third = (program.allocate(40 * MIB) for _ in range(3))
    program.free(second)
    program.allocate(40 * MIB)
    assert program.reserved_mib == 120
    program.free(third)
    program.allocate(50 * MIB)
    assert program.reserved_mib == 140
    program.allocate(10 * MIB)
    assert program.reserved_mib == 140
    program.free(first)


def test_large_blocks_are_kept_whole_where_splitting_them_is_forbidden(
    program: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    program.free(program.allocate(200 * MIB))
    program.allocate(50 * MIB)
    assert program.reserved_mib == 200
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:128")
    assert program.reserved_mib == 250


def test_requests_are_rounded_up_to_divisions_of_a_power_of_two(
    program: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    program.allocate(33 * MIB)
    assert program.reserved_mib == 34
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "roundup_power2_divisions:4")
    assert program.reserved_mib == 40


def test_blocks_that_were_joined_are_joined_with_what_is_freed_before_them(program: Program) -> None:
    first, second, third = (program.allocate(size) for size in (MIB / 2, MIB / 4, MIB / 4))
    program.allocate(MIB)  # the rest of the segment
    program.free(second, third, first)
    program.allocate(MIB)
    assert program.reserved_mib == 2


def test_an_expandable_segment_grows_from_its_last_block_joined_with_its_end(
    program: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    program.free(program.allocate(12 * MIB))  # 8 of 20 MiB behind it are free
    program.allocate(30 * MIB)
    assert program.reserved_mib == 40
