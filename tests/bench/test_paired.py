import pytest

from moesaic.bench.paired import Spread, alternate, ratios


def test_arms_run_in_turns_and_know_the_number_of_their_pair() -> None:
    calls: list[str] = []

    def arm(name: str, i: int) -> str:
        calls.append(f"{name}{i}")
        return calls[-1]

    pairs = alternate(lambda i: arm("a", i), lambda i: arm("b", i), 3)
    assert calls == ["a0", "b0", "a1", "b1", "a2", "b2"]
    assert [(p.first, p.second) for p in pairs] == [("a0", "b0"), ("a1", "b1"), ("a2", "b2")]


def test_a_spread_is_the_median_and_the_range() -> None:
    assert Spread.of([4.0, 1.0, 2.0]) == Spread(median=2.0, low=1.0, high=4.0, n=3)
    assert Spread.of([1.0, 2.0]).median == 1.5


def test_a_spread_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 1 sample"):
        Spread.of([])


def test_ratios_are_taken_pair_by_pair() -> None:
    """A machine that is half as fast during the second pair changes no ratio."""
    assert ratios([4.0, 8.0, 9.0], [2.0, 4.0, 3.0]) == Spread(median=2.0, low=2.0, high=3.0, n=3)


def test_arms_of_different_length_have_no_ratios() -> None:
    with pytest.raises(ValueError, match="shorter"):
        ratios([1.0, 2.0], [1.0])


def test_a_spread_reads_as_its_median_and_range() -> None:
    assert Spread.of([1.0, 2.25, 4.0]).text(1) == "2.2 (1.0 to 4.0)"
    assert Spread.of([2.25]).text() == "2.25"
