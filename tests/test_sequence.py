import pytest

from moesaic.errors import InvariantError
from moesaic.request import Request, SamplingParams
from moesaic.sequence import SeqId, Sequence, SequenceStatus


def create(num_prompt: int = 5, max_tokens: int = 3, eos: tuple[int, ...] = (), **params: object) -> Sequence:
    sampling = SamplingParams(max_tokens=max_tokens, **params)  # type: ignore[arg-type]  # test input
    request = Request(request_id="r", prompt_token_ids=tuple(range(num_prompt)), sampling_params=sampling)
    return Sequence(SeqId(0), request, max_tokens=max_tokens, eos_token_ids=eos)


def test_prefill_turns_to_decode_exactly_at_the_end_of_the_prompt() -> None:
    seq = create(5)
    seq.advance_prefill(2)
    assert (seq.status, seq.num_prefill_tokens_left) == (SequenceStatus.PREFILL, 3)
    seq.advance_prefill(3)
    assert (seq.status, seq.committed_kv_tokens) == (SequenceStatus.DECODE, 5)


@pytest.mark.parametrize("num_tokens", [0, -1, 4])
def test_advancing_past_the_prompt_is_refused(num_tokens: int) -> None:
    seq = create(5)
    seq.advance_prefill(2)
    with pytest.raises(InvariantError, match="its prefill ends at 5"):
        seq.advance_prefill(num_tokens)
    assert seq.committed_kv_tokens == 2


def test_recompute_prefills_outputs_too_and_goes_on_where_it_was() -> None:
    seq = create(3, max_tokens=5)
    seq.advance_prefill(3)
    seq.append_token(70)
    seq.advance_decode()
    seq.append_token(71)
    seq.restart()
    assert (seq.status, seq.num_prefill_tokens_left) == (SequenceStatus.WAITING, 5)
    seq.advance_prefill(5)
    assert seq.status is SequenceStatus.DECODE
    seq.append_token(72)
    assert seq.output_token_ids.tolist() == [70, 71, 72]
    seq.check()


def test_output_ends_at_max_tokens_stop_ids_and_eos() -> None:
    seq = create(3, max_tokens=2, eos=(9,), stop_token_ids=[8])
    assert [seq.append_token(7), seq.append_token(7)] == [None, "length"]
    assert create(3, eos=(9, 10)).append_token(10) == "stop"
    assert create(3, eos=(9,), stop_token_ids=[8]).append_token(8) == "stop"
    assert create(3, eos=(9,), ignore_eos=True).append_token(9) is None
    assert create(3, eos=(9,), ignore_eos=True, stop_token_ids=[8]).append_token(8) == "stop"
    assert create(3, eos=(9,), min_tokens=1).append_token(9) is None


def test_reset_undoes_a_step() -> None:
    seq = create(4)
    seq.advance_prefill(2)
    mark = seq.mark()
    seq.advance_prefill(2)
    seq.append_token(5)
    seq.reset(mark)
    assert (seq.mark(), seq.output_token_ids.tolist()) == (mark, [])


@pytest.mark.parametrize("end", [SequenceStatus.FINISHED, SequenceStatus.CANCELLED, SequenceStatus.FAILED])
def test_nothing_follows_an_end(end: SequenceStatus) -> None:
    for status in SequenceStatus:
        seq = create()
        seq.status = end
        with pytest.raises(InvariantError, match="cannot go from"):
            seq.move_to(status)


def test_token_views_cannot_be_written() -> None:
    with pytest.raises(ValueError, match="read-only"):
        create().tokens(0, 2)[0] = 1


def test_long_outputs_outgrow_the_first_buffer() -> None:
    seq = create(3, max_tokens=1000)
    for i in range(500):
        seq.append_token(i)
    assert seq.output_token_ids.tolist() == list(range(500))
