"""What would make a launch fail, found before it.

requirements: hosts, run file and numbers of processes. rehearsal: one rank of a planned grid, in one process without a
GPU: the real engine on fake tensors, a step of each stage. stand_ins: what is not real, and why. live_bytes: counts
tensors. findings: the verdict. Read rehearsal first.
"""
