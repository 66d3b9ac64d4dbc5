"""DeepSpeed, reduced to a few verbs: forward, accumulate, update, save and load. The only room that trains.

session: join and leave the grid. build: from a run to an engine. engine: the verbs. gradients: those of a step.
state: weights and optimizer state by name. zero_layout: where ZeRO keeps them. saving: what DeepSpeed writes of a
checkpoint. ds_config, optimizer: settings. extensions: what DeepSpeed compiles. spikes: losses far above the median.
preflight: does it fit? Read engine, gradients and build.
"""
