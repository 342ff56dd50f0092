"""How modules are folded for a reader."""

from __future__ import annotations

from autotune.records.explanation import fold_repeats


def test_equal_blocks_beside_each_other_are_one() -> None:
    figures = {"stem": 5.0}
    for number in range(12):
        figures |= {f"h.{number}": 1.0, f"h.{number}.mlp.0": 40.0 if number < 11 else 80.0}
    folds = {fold.label: fold for fold in fold_repeats(figures)}
    assert list(folds) == ["h.0-10", "h.11", "stem"]
    assert folds["h.0-10"].blocks[9] == ("h.9", "h.9.mlp.0")


def test_a_block_alone_is_taken_apart_where_equal_blocks_are_in_it() -> None:
    figures = {"0": 5.0, "2": 5.0} | {f"1.{number}.{layer}": 1.0 for number in range(12) for layer in (0, 2)}
    assert [(fold.label, fold.block) for fold in fold_repeats(figures)] == [("0", "0"), ("1.0-11", "1.0"), ("2", "2")]
    assert [fold.label for fold in fold_repeats({"0.0": 1.0, "0.1": 1.0, "1": 5.0})] == ["0", "1"]


def test_blocks_of_other_insides_stay_apart() -> None:
    assert [fold.label for fold in fold_repeats({"0.norm": 1.0, "1.conv": 1.0, "(loss)": 1.0})] == ["0", "1", "(loss)"]
