"""How layers are split over the processes of a grid.

topology: this process's place in the grid. collectives: the differentiable ones. sharding: how a parameter is split,
defined once. stream: what is between layers. layers, loss: what is split. randomness: keyed random numbers.
dropout: masks that are drawn again. device: what one process does with its own. local_ranks: ranks without a launcher.
Read topology, sharding, stream and layers first.
"""
