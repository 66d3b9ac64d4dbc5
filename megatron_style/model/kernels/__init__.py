"""The computation of attention. Every function computes the same softmax; they differ in what they keep and skip.

attend: the functions that layers call. parts: a cache and the segment after it, in torch's CPU kernel. tiles: the same
with dropout, and in bfloat16.
"""
