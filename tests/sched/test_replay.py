"""Schedules are recorded and replayed: the same commands give the same plans, and a changed line is found."""

import json
import logging
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from moesaic.config import EngineConfig
from moesaic.errors import ConfigError, InvariantError, QueueFullError, RequestTooLargeError
from moesaic.request import Request, SamplingParams, StepOutput
from moesaic.sched.factory import make_scheduler
from moesaic.sched.recording import RecordingScheduler
from moesaic.sched.replay import replay
from moesaic.sched.transaction import StepTransaction
from moesaic.testing.scheduling import FakeRunner, create_request, run_step, run_until_idle

ACTIONS = st.sampled_from(
    [
        "step",
        "step",
        "step",
        "step",
        "rollback",
        "abort",
        "fail",
        "preempt",
        "swap out",
        "pause",
        "resume",
        "overlap",
        "ahead",
        "ahead",
        "late abort",
        "bad commit",
    ]
)
STOP_ID = 3
"""A token that ``FakeRunner(vocab_size=13)`` draws often."""


@st.composite
def configs(draw: st.DrawFn) -> EngineConfig:
    block_size, rows = draw(st.sampled_from([1, 2, 4])), draw(st.sampled_from([2, 4, 8]))
    return EngineConfig(
        enable_chunked_prefill=draw(st.booleans()),
        prefill_chunk_size=draw(st.sampled_from([2, 8])),
        max_partial_prefills=draw(st.sampled_from([1, 3])),
        max_batch_size=rows,
        max_tokens_per_step=rows + block_size + draw(st.sampled_from([0, 5, 30])),
        scheduling_policy=draw(st.sampled_from(["fcfs", "priority", "shortest-prefill-first"])),
        priority_aging_steps=draw(st.sampled_from([1, 16])),
        max_waiting_requests=draw(st.sampled_from([None, 3])),
        block_size=block_size,
    )


def create_recording(path: Path, config: EngineConfig | None = None, **more: Any) -> RecordingScheduler:
    config = config or EngineConfig(max_batch_size=4, max_tokens_per_step=16, block_size=4)
    settings = {name: getattr(config, name) for name in EngineConfig.__dataclass_fields__}
    config = EngineConfig(**(settings | {"decision_log": str(path)}))
    defaults = {"num_blocks": 12, "max_model_len": 200, "num_swap_blocks": 0}
    scheduler = make_scheduler(config, **(defaults | more))
    assert isinstance(scheduler, RecordingScheduler)
    return scheduler


class Driver:
    """Does at random what an engine and its clients do; half of the swap copies fail."""

    def __init__(self, scheduler: RecordingScheduler) -> None:
        self.scheduler = scheduler
        self.runner = FakeRunner(vocab_size=13)
        self.full_tokens = scheduler.max_tokens_per_step
        self.num_requests = 0

    def add(self, num_prompt_tokens: int, max_tokens: int) -> None:
        params = SamplingParams(max_tokens=max_tokens, stop_token_ids=(STOP_ID,))
        tokens = tuple(range(5, 5 + num_prompt_tokens))
        name, priority = f"r{self.num_requests}", max_tokens % 3 - 1
        leader = self.scheduler.get(f"r{num_prompt_tokens % max(1, self.num_requests)}") if max_tokens % 2 else None
        request = Request(
            request_id=name,
            prompt_token_ids=tokens if leader is None else leader.request.prompt_token_ids,
            sampling_params=params,
            priority=priority,
            sibling_of=None if leader is None else leader.request.request_id,
        )
        try:
            self.scheduler.add(request)
            self.num_requests += 1
        except (RequestTooLargeError, QueueFullError):
            pass

    def act(self, action: str, choice: int) -> None:
        name = f"r{choice % max(1, self.num_requests)}"
        match action:
            case "step" | "rollback" | "overlap" | "ahead" | "late abort" | "bad commit":
                self.step(action, name, choice)
            case "fail":
                self.scheduler.fail(name, "a reason")
            case "swap out":
                self.scheduler.preempt(name, by="swap")
            case _:
                getattr(self.scheduler, action)(name)

    def step(self, action: str, name: str, choice: int) -> None:
        scheduler = self.scheduler
        self.swap(choice)
        scheduler.max_tokens_per_step = self.full_tokens - choice % 2  # as the engine does when memory runs out
        with scheduler.step() as tx:
            tokens = self.runner.run(tx.plan, tx.sequences)
            if action == "rollback":
                return
            if action == "bad commit":
                with pytest.raises(InvariantError):
                    tx.commit([*tokens, STOP_ID])
                return
            if action == "late abort":
                scheduler.abort(name)
            if action == "overlap":
                with scheduler.step() as second:
                    second.commit(self.runner.run(second.plan, second.sequences))
            if action == "ahead" and tx.advance():
                self.end_ahead(tx, tokens, name, choice)
            else:
                tx.commit(tokens)

    def end_ahead(self, tx: StepTransaction, tokens: list[int], name: str, choice: int) -> None:
        with self.scheduler.step() as second:
            more = self.runner.run(second.plan, second.sequences)
            if choice % 3 == 0:
                self.scheduler.abort(name)
            if choice % 3 == 1:
                second.rollback()  # and the advanced one at the end of its own block
            else:
                tx.commit(tokens)
                second.commit(more)

    def swap(self, choice: int) -> None:
        self.scheduler.begin_swap_ins()
        for transfer in self.scheduler.take_swap_transfers():
            if (transfer.transfer_id + choice) % 2:
                self.scheduler.end_swap(transfer)
            else:
                self.scheduler.fail_swap(transfer)


@settings(max_examples=80, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    configs(),
    st.sampled_from([8, 16, 64]),
    st.sampled_from([0, 8]),
    st.lists(
        st.tuples(ACTIONS, st.integers(0, 20), st.none() | st.tuples(st.integers(1, 40), st.integers(0, 8))),
        max_size=60,
    ),
)
def test_a_replay_of_any_schedule_makes_the_same_decisions(
    tmp_path: Path,
    config: EngineConfig,
    num_blocks: int,
    num_swap_blocks: int,
    actions: list[tuple[str, int, tuple[int, int] | None]],
) -> None:
    path = tmp_path / "log"
    scheduler = create_recording(path, config, num_blocks=num_blocks, num_swap_blocks=num_swap_blocks)
    driver = Driver(scheduler)
    for action, choice, new in actions:
        if new is not None:
            driver.add(*new)
        driver.act(action, choice)
    scheduler.log.close()
    result = replay(path)
    assert result.first_difference is None
    assert not result.is_truncated


def record_run(path: Path) -> dict[str, list[StepOutput]]:
    """Record requests that stop early, reach their length, are swapped out and aborted."""
    scheduler = create_recording(path, num_blocks=8, num_swap_blocks=8)
    runner = FakeRunner()
    outputs: dict[str, list[StepOutput]] = {}
    for i in range(3):
        scheduler.add(create_request(f"r{i}", 5 + i, max_tokens=16))
    third_token = (31 * 3 + 17 * (4 + 2)) % runner.vocab_size
    scheduler.add(create_request("stops", 4, max_tokens=9, stop_token_ids=[third_token]))
    for step in range(200):
        if not scheduler.has_unfinished:
            break
        if step == 4:
            scheduler.abort("r2")
        for output in run_step(scheduler, runner):
            outputs.setdefault(output.request_id, []).append(output)
    scheduler.log.close()
    return outputs


def entries(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def write(path: Path, lines: list[Any]) -> None:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_a_log_tells_of_each_kind_of_end(tmp_path: Path) -> None:
    path = tmp_path / "log"
    ends = {name: outputs[-1].finish_reason for name, outputs in record_run(path).items()}
    assert ends == {"r0": "length", "r1": "length", "r2": "abort", "stops": "stop"}
    verbs = {entry[0] for entry in entries(path)[1:]}
    assert verbs == {"add", "abort", "step", "commit", "swap_in", "swap_begin", "swap_end", "times"}
    result = replay(path)
    assert result.first_difference is None
    assert result.num_steps == sum(entry[0] == "step" for entry in entries(path)[1:])
    assert result.num_commands > 5


def test_a_forced_swap_is_recorded_and_replayed_and_one_that_was_refused_is_not(tmp_path: Path) -> None:
    path = tmp_path / "log"
    scheduler, runner = create_recording(path, num_swap_blocks=3), FakeRunner()
    for name in ("small", "large"):
        scheduler.add(create_request(name, 4 if name == "small" else 14, max_tokens=4))
    while len(scheduler.running.decoding) < 2:
        run_step(scheduler, runner)
    assert scheduler.preempt("small", by="swap")
    assert not scheduler.preempt("large", by="swap")
    run_until_idle(scheduler, runner)
    scheduler.log.close()
    assert [entry for entry in entries(path)[1:] if entry[0] == "swap_out"] == [["swap_out", 0]]
    assert replay(path).first_difference is None


def test_a_log_holds_no_token_ids_and_no_names_of_requests(tmp_path: Path) -> None:
    path = tmp_path / "log"
    scheduler = create_recording(path)
    scheduler.add(
        Request(request_id="secret", prompt_token_ids=(424242,), sampling_params=SamplingParams(max_tokens=1))
    )
    scheduler.fail("secret", "another secret")
    scheduler.log.close()
    assert "secret" not in path.read_text()
    assert "424242" not in path.read_text()
    assert entries(path)[1:] == [["add", 0, 1, 1, 0, None], ["fail", 0]]


def test_a_changed_plan_is_found_with_its_step(tmp_path: Path) -> None:
    path = tmp_path / "log"
    record_run(path)
    lines = entries(path)
    index = next(i for i, entry in enumerate(lines) if i > 30 and entry[0] == "step" and entry[3])
    lines[index][3][-1] = 77
    write(path, lines)
    difference = replay(path).first_difference
    assert difference is not None
    assert f"line {index + 1}, step {lines[index][1]}: expected decode [" in difference
    assert "77], chunks []" in difference


def test_a_scheduler_with_other_settings_decides_otherwise(tmp_path: Path) -> None:
    path = tmp_path / "log"
    scheduler = create_recording(path)
    scheduler.add(create_request("r", 12, max_tokens=4))
    run_step(scheduler, FakeRunner())
    scheduler.log.close()
    lines = entries(path)
    lines[0]["settings"] |= {"enable_chunked_prefill": True, "prefill_chunk_size": 5}
    write(path, lines)
    expected = "line 3, step 0: expected decode [], chunks [[0, 0, 12]], got decode [], chunks [[0, 0, 5]]"
    assert replay(path).first_difference == expected


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        (["commit", 0, [[0, "length"]]], "expected finished [[0, 'length']], got finished []"),
        (["abort", 9], "expected abort 9: True, got abort 9: False"),
        (["commit", 7, []], "got KeyError: 7"),
        (["add", 5, 1, 1, 0, None], "expected sequence 5, got sequence 1"),
        (["add", 1, 500, 1, 0, None], "got RequestTooLargeError"),
        (["swap_in", [0]], "expected swapped in [0], got swapped in []"),
        (["swap_begin", [[0, 0, "out"]]], "expected copies [[0, 0, 'out']], got copies []"),
    ],
)
def test_a_decision_that_the_scheduler_does_not_make_is_a_difference(
    tmp_path: Path, entry: list[Any], message: str
) -> None:
    path = tmp_path / "log"
    scheduler = create_recording(path)
    scheduler.add(create_request("r", 4, max_tokens=4))
    scheduler.step()
    scheduler.log.close()
    write(path, [*entries(path), entry])
    difference = replay(path).first_difference
    assert difference is not None
    assert difference.startswith("line 4, step 0: ")
    assert message in difference


def test_a_last_line_that_a_crash_cut_off_is_told_and_the_rest_replayed(tmp_path: Path) -> None:
    path = tmp_path / "log"
    record_run(path)
    whole = replay(path)
    path.write_text(path.read_text()[:-4])
    result = replay(path)
    assert result.is_truncated
    assert result.first_difference is None
    assert result.num_steps == whole.num_steps


def test_a_damaged_line_in_the_middle_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "log"
    record_run(path)
    lines = path.read_text().splitlines()
    lines[5] = lines[5][:3]
    path.write_text("\n".join(lines))
    with pytest.raises(ConfigError, match=r"line 6 .* is damaged"):
        replay(path)


@pytest.mark.parametrize("entry", [["dance", 1], [], {"a": 1}, 5, None, ["step", 0], ["add", 0, "x", 1, 0, None]])
def test_a_line_that_is_no_decision_is_refused(tmp_path: Path, entry: Any) -> None:
    path = tmp_path / "log"
    create_recording(path).log.close()
    write(path, [*entries(path), entry])
    with pytest.raises(ConfigError, match="line 2 of the log holds no decision"):
        replay(path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": "other"}, "no header of a decision log"),
        ({"version": 1}, "version 1 but this Moesaic reads version 2"),
        ({"num_pages": 3}, "the header has other settings"),
        ({"settings": {}}, "the header has other settings"),
    ],
)
def test_a_header_of_another_kind_or_version_is_refused(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    path = tmp_path / "log"
    create_recording(path).log.close()
    write(path, [entries(path)[0] | change])
    with pytest.raises(ConfigError, match=message):
        replay(path)


@pytest.mark.parametrize("content", ["", "{", "[1]\n", "hello\n", "\xff\xfe"])
def test_a_file_that_is_no_log_is_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "log"
    path.write_text(content, encoding="latin-1")
    with pytest.raises(ConfigError, match=r"decision log|is damaged"):
        replay(path)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="check the path"):
        replay(tmp_path / "nowhere")


@pytest.mark.parametrize("path", ["/dev/full", "", "nowhere/log"])
def test_a_log_that_cannot_be_written_is_refused_at_start(path: str) -> None:
    with pytest.raises(ConfigError, match=r"cannot be written .*--decision-log"):
        create_recording(Path(path) if path else Path("."))


def test_a_write_that_fails_ends_the_log_once_and_no_step(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    scheduler = create_recording(path)
    os.close(reader)
    with caplog.at_level(logging.ERROR):
        for i in range(2):
            scheduler.add(create_request(f"r{i}", 4, max_tokens=2))
            scheduler.step().rollback()
    assert not scheduler.log.is_open
    assert [r.getMessage().split(":")[0] for r in caplog.records] == ["decision log ended"]
    assert sum(len(run_step(scheduler, FakeRunner())) for _ in range(4)) == 4


def test_times_are_those_of_the_phases_and_a_replay_passes_over_them(tmp_path: Path) -> None:
    path, looks = tmp_path / "log", iter((1.0, 1.5, 10.0, 10.5, 12.0, 12.25))
    scheduler = create_recording(path, clock=lambda: next(looks))
    scheduler.add(create_request("r", 4, max_tokens=1))
    scheduler.step().rollback()
    run_step(scheduler, FakeRunner())
    scheduler.log.close()
    assert [e for e in entries(path)[1:] if e[0] == "times"] == [["times", 1, 10.0, 0.5, 1.5, 0.25]]
    assert replay(path).first_difference is None


def test_a_failed_step_is_written_out_at_once_and_others_when_the_log_is_collected(tmp_path: Path) -> None:
    path = tmp_path / "log"
    scheduler = create_recording(path)
    scheduler.add(create_request("r", 4, max_tokens=2))
    assert len(entries(path)) == 1
    scheduler.step().rollback()
    assert [entry[0] for entry in entries(path)[1:]] == ["add", "step", "rollback"]
    run_step(scheduler, FakeRunner())
    del scheduler
    assert [entry[0] for entry in entries(path)[4:]] == ["step", "commit", "times"]
