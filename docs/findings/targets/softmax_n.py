"""slow_attention_n of flash-attention-softmax-n."""

import os
import sys

sys.path.insert(0, os.path.dirname(__file__))
from common import refuse


def function():
    """The function from its own file: the package cannot be imported without a GPU."""
    from importlib import util
    from importlib.metadata import distribution

    library = distribution("flash-attention-softmax-n")
    where = library.locate_file("flash_attention_softmax_n/core/functional.py")
    spec = util.spec_from_file_location("functional", where)
    module = util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.slow_attention_n


def attention(query, key, value, attn_mask=None, is_causal=False, scale=None):
    """slow_attention_n of flash-attention-softmax-n with n = 0: scaled_dot_product_attention by its docstring."""
    slow_attention_n = function()
    refuse(query.shape[1] != key.shape[1], "heads")
    refuse(0 in query.shape or 0 in key.shape, "empty")
    refuse(is_causal and query.shape[2] != key.shape[2], "causal is aligned bottom-right")
    return slow_attention_n(query, key, value, attn_mask=attn_mask, is_causal=is_causal, scale=scale)
