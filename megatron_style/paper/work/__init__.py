"""The work of an experiment, as processes of the ordinary commands.

jobs: what is trained and evaluated, in which order. evaluations: calls of `evaluate` and their kept results. records:
what stands for a run without its model. sharing: first stages that several runs have in common. ownership: one
`reproduce` per folder, and no orphans. processes: a few commands at a time. Read jobs first.
"""
