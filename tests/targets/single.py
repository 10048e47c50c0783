"""A file with one candidate, beside functions that are none."""

from layers import attend


def helper(x, y):
    return x + y


def _private(q, k, v):
    return q


def attention(q, k, v, is_causal=False):
    return attend(q, k, v)[0]
