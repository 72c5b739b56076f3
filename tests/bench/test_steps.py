"""Steps from a hand-written decision log."""

import json
from pathlib import Path

from moesaic.bench.events import StepColumn
from moesaic.bench.steps import read_steps
from moesaic.config import EngineConfig
from moesaic.sched.decisions import Header


def test_kv_blocks_follow_chunks_decode_rows_swaps_and_ends(tmp_path: Path) -> None:
    header = Header.of(EngineConfig(block_size=4), 8, 64, 8)
    entries = [
        header.as_entry(),
        ["add", "0", 9, 1, 0],
        ["add", "1", 6, 3, 0],
        ["step", 1, 8, [], [["0", 0, 8]]],
        ["commit", 1, []],
        ["step", 2, 8, [], [["0", 8, 1], ["1", 0, 6]]],
        ["commit", 2, [["0", "length"]]],
        ["step", 3, 8, ["1"], []],
        ["commit", 3, []],
        ["swap_begin", [[0, "1", "out"]]],
        ["swap_end", 0],
        ["swap_begin", [[1, "1", "in"]]],
        ["swap_end", 1],
        ["step", 4, 8, None, []],
        ["rollback", 4],
        ["step", 5, 8, None, []],
        ["commit", 5, [["1", "length"]]],
    ]
    path = tmp_path / "log"
    path.write_text("".join(json.dumps(e) + "\n" for e in entries), encoding="ascii")
    assert read_steps(path, ("a", "b")) == (
        StepColumn(decode_rows=0, chunks=(("a", 8),), kv_blocks=2),
        StepColumn(decode_rows=0, chunks=(("a", 1), ("b", 6)), kv_blocks=5),
        StepColumn(decode_rows=1, chunks=(), kv_blocks=2),
        StepColumn(decode_rows=1, chunks=(), kv_blocks=2),
    )
    assert next(c.chunks for c in read_steps(path, ("b",))) == (("b", 6),)


def test_a_sequence_that_starts_again_held_nothing_since_its_last_row(tmp_path: Path) -> None:
    entries = [
        Header.of(EngineConfig(block_size=4), 8, 64, 0).as_entry(),
        ["add", "0", 4, 3, 0],
        ["add", "1", 4, 3, 0],
        ["step", 1, 8, [], [["0", 0, 4], ["1", 0, 4]]],
        ["commit", 1, []],
        ["step", 2, 8, ["0"], []],
        ["commit", 2, [["0", "length"]]],
        ["step", 3, 8, [], [["1", 0, 5]]],
        ["commit", 3, []],
    ]
    path = tmp_path / "log"
    path.write_text("".join(json.dumps(e) + "\n" for e in entries), encoding="ascii")
    assert [c.kv_blocks for c in read_steps(path, ("a", "b"))] == [2, 2, 2]


def test_a_step_has_the_times_that_the_log_has_of_it(tmp_path: Path) -> None:
    entries = [
        Header.of(EngineConfig(block_size=4), 8, 64, 0).as_entry(),
        ["add", "0", 4, 3, 0],
        ["step", 1, 8, [], [["0", 0, 4]]],
        ["commit", 1, []],
        ["times", 1, 7.0, 0.5, 2.0, 0.25],
        ["step", 2, 8, ["0"], []],
        ["commit", 2, []],
    ]
    path = tmp_path / "log"
    path.write_text("".join(json.dumps(e) + "\n" for e in entries), encoding="ascii")
    first, second = read_steps(path, ("a",))
    assert (first.times_s, first.duration_s) == ((7.0, 0.5, 2.0, 0.25), 2.75)
    assert (second.times_s, second.duration_s) == (None, None)
