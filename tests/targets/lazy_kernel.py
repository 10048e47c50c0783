"""A kernel that loads one element too far."""

import triton
import triton.language as tl


@triton.jit
def last(K, OUT, n):
    tl.store(OUT, tl.load(K + n))
