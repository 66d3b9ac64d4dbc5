"""How layers are split over the processes of a grid.

topology: this process's place in the grid. collectives: the differentiable ones. sharding: how a parameter is split,
defined once. stream: what is between layers. layers, loss: what is split. randomness: keyed random numbers.
peak_memory: that of this process. Read topology, sharding, stream and layers first.
"""
