"""What the sampler must know about one row of the logits."""

from collections.abc import Sequence as SequenceOf
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from moesaic.request import SamplingParams


class SamplingRow(NamedTuple):
    """One row that samples in this step. A named tuple, not a dataclass: 256 of them are built in each step.

    With repetition, presence or frequency penalties the token ids are read in each step; an int64 array is then
    read as it is, any other sequence is converted first (30 ns a token).
    """

    params: SamplingParams
    prompt_token_ids: SequenceOf[int] | NDArray[np.int64]
    output_token_ids: SequenceOf[int] | NDArray[np.int64]
    """The output so far; its length is the position of the token to be chosen."""
    seed: int
    """64 bits: the request's own seed or one drawn by the engine, the same in all its steps."""
    allowed_tokens: NDArray[np.uint8] | None = None
    """Bit ``i % 8`` of byte ``i // 8`` is set if token ``i`` may be chosen; at least V bits. None allows all."""
