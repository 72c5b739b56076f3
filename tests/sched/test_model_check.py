"""Every interleaving of small schedulers; see docs/verification.md for the counts. About 100 seconds in all."""

import pytest

from moesaic.sched.running import RunningSet
from moesaic.testing.model_check import Model, explore

TIGHT = ((1, 4), (1, 3), (2, 3))  # outputs grow until somebody must give blocks back

MODELS = {
    "chunked": Model(),
    "chunked, two lanes, preempted": Model(max_partial_prefills=2, commands=("abort", "preempt")),
    "chunked, blocks of two": Model(block_size=2, num_blocks=3, requests=((3, 4), (4, 2), (2, 3)), max_batch_size=3),
    "chunked, tight": Model(requests=TIGHT, max_batch_size=3),
    "chunked, swap": Model(requests=TIGHT, max_batch_size=3, num_swap_blocks=4),
    "chunked, two lanes, swapped": Model(
        max_batch_size=3, max_partial_prefills=2, num_swap_blocks=4, commands=("abort", "swap out")
    ),
    "chunked, two in flight": Model(
        requests=TIGHT[:2], max_batch_size=3, max_steps_in_flight=2, commands=("abort", "preempt")
    ),
    "chunked, advanced": Model(max_steps_in_flight=2, advances=True, num_blocks=6, requests=((3, 2), (1, 3))),
    "chunked, two lanes, advanced": Model(
        requests=((3, 2), (2, 1)),
        num_blocks=6,
        max_partial_prefills=2,
        max_steps_in_flight=2,
        advances=True,
        commands=("preempt",),
    ),
    "whole, advanced, swap": Model(
        chunked=False,
        requests=((1, 3), (2, 2)),
        max_steps_in_flight=2,
        advances=True,
        num_swap_blocks=3,
        commands=("abort", "swap out"),
    ),
    "chunked, paused": Model(requests=((3, 2), (2, 2)), commands=("abort", "pause")),
    "chunked, siblings": Model(
        requests=((3, 2), (3, 2), (3, 1)), siblings=(1, 2), num_blocks=5, commands=("abort", "preempt")
    ),
    "chunked, siblings, swap": Model(
        requests=((3, 2), (3, 2)), siblings=(1,), num_blocks=4, num_swap_blocks=3, commands=("swap out", "pause")
    ),
    "chunked, siblings, advanced": Model(
        requests=((3, 2), (3, 1)), siblings=(1,), num_blocks=6, max_steps_in_flight=2, advances=True
    ),
    "whole, siblings": Model(
        requests=((3, 2), (3, 2), (2, 1)), siblings=(1,), chunked=False, commands=("abort", "preempt")
    ),
    "whole": Model(chunked=False),
    "whole, swap": Model(requests=TIGHT, max_batch_size=3, num_swap_blocks=2, chunked=False),
    "whole, blocks of two, two in flight": Model(
        chunked=False, block_size=2, num_blocks=3, requests=((3, 4), (4, 2)), max_steps_in_flight=2
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_no_interleaving_breaks_a_rule_and_every_state_drains(name: str) -> None:
    seen = explore(MODELS[name])
    assert seen.num_states > 90
    assert seen.longest_drain_steps <= 12
    wanted = {"add", "begin", "commit", "rollback", "settle", *MODELS[name].commands}
    if MODELS[name].num_swap_blocks:
        wanted |= {"swap in", "take copies", "end copy", "fail copy"}
    assert wanted <= seen.verbs
    assert seen.most_preemptions > 0 or MODELS[name].requests != TIGHT


def test_a_broken_rule_is_reported_with_the_way_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """The checker must be able to fail: a request that leaves its step keeps its place among the running."""
    monkeypatch.setattr(RunningSet, "discard", lambda self, seq: None)
    with pytest.raises(AssertionError, match=r"\('add', 0\), \('begin', 0\)"):
        explore(Model())


def test_a_model_without_an_end_is_reported() -> None:
    with pytest.raises(AssertionError, match="no end after"):
        explore(Model(requests=((3, 2),), max_drain_steps=1))


def test_without_plan_checks_nothing_is_proven(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOESAIC_CHECK", "0")
    with pytest.raises(ValueError, match="MOESAIC_CHECK=1"):
        explore(Model())
