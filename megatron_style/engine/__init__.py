"""DeepSpeed, reduced to a few verbs: forward, accumulate, update, save and load. The only folder that trains.

session: join and leave the grid. build: from a run to an engine. engine: the verbs. zero_layout: where ZeRO keeps each
parameter. ds_config, optimizer, preflight, memory, requirements, local_ranks. Read engine, then build.
"""
