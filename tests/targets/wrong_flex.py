"""flex targets, each wrong in one way: the correct one with one fault."""

from functools import partial

import torch
from layers import attend


def _at(sizes, fault, G):
    """Index tensors b, h, i, j that broadcast to the scores."""
    b, h, i, j = (torch.arange(n).view([-1 if a == axis else 1 for a in range(4)]) for axis, n in enumerate(sizes))
    if fault == "first_batch_everywhere":
        b = 0 * b
    if fault == "key_heads_for_heads":
        h = h // G
    if fault == "query_index_within_its_tile":
        i = i % 16
    return b, h, i, j


def _keep(block_mask, at, sizes, fault):
    """The pairs allowed."""
    if block_mask is None or fault == "ignores_block_mask":
        return None
    if fault == "partial_blocks_are_full":
        tiles = block_mask.to_dense().bool()
        q, k = block_mask.BLOCK_SIZE
        return tiles.repeat_interleave(q, 2)[:, :, : sizes[2]].repeat_interleave(k, 3)[..., : sizes[3]]
    keep = block_mask.mask_mod(*at)
    return keep & (at[3] % 16 != 15) if fault == "last_key_of_a_tile_lost" else keep


def attention(
    query, key, value, score_mod=None, block_mask=None, scale=None, enable_gqa=False, return_lse=False, *, fault=""
):
    sizes = (*query.shape[:3], key.shape[2])
    at = _at(sizes, fault, query.shape[1] // key.shape[1])
    keep, change, k = _keep(block_mask, at, sizes, fault), None, key
    if score_mod is not None and fault != "ignores_score_mod":
        factor = query.shape[-1] ** -0.5 if scale is None else scale
        change = lambda s: score_mod(s, *at)  # noqa: E731
        if fault == "score_mod_before_scale":
            change, scale = lambda s: factor * score_mod(s, *at), 1.0
    if fault == "heads_interleaved":
        k, value = (x.repeat(1, query.shape[1] // x.shape[1], 1, 1) for x in (key, value))
    o, lse = attend(query, k, value, keep=keep, change=change, scale=scale)
    if fault == "lse_before_score_mod" and change is not None:
        lse = attend(query, k, value, keep=keep, scale=scale)[1]
    if fault == "dead_rows_are_nan":
        o = torch.where((lse == -torch.inf)[..., None], torch.nan, o)
    return (o, lse) if return_lse else o


ignores_score_mod = partial(attention, fault="ignores_score_mod")
ignores_block_mask = partial(attention, fault="ignores_block_mask")
score_mod_before_scale = partial(attention, fault="score_mod_before_scale")
first_batch_everywhere = partial(attention, fault="first_batch_everywhere")
key_heads_for_heads = partial(attention, fault="key_heads_for_heads")
query_index_within_its_tile = partial(attention, fault="query_index_within_its_tile")
partial_blocks_are_full = partial(attention, fault="partial_blocks_are_full")
last_key_of_a_tile_lost = partial(attention, fault="last_key_of_a_tile_lost")
heads_interleaved = partial(attention, fault="heads_interleaved")
lse_before_score_mod = partial(attention, fault="lse_before_score_mod")
dead_rows_are_nan = partial(attention, fault="dead_rows_are_nan")
