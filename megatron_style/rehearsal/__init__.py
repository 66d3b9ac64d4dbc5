"""One rank of a planned grid, in one process without a GPU: the real engine on fake tensors.

rehearsal: a step of each stage. stand_ins: what is not real, and why. live_bytes: counts tensors. findings: the
verdict. Read rehearsal first.
"""
