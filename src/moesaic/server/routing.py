"""Expert ids of the tokens of an answer, as clients read them."""

import base64
import io

import numpy as np

from moesaic.request import RoutedTokens


def encoded_npy(routed: RoutedTokens) -> str:
    """Return the ids as a ``.npy`` file in base64: int16 [tokens, layers, experts per token].

    The form is that of vLLM and SGLang (``routed_experts`` of a choice).
    """
    file = io.BytesIO()
    np.save(file, routed.array())
    return base64.b64encode(file.getvalue()).decode("ascii")
