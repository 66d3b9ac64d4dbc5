"""How layers are split over the processes of a grid.

topology: where this process sits. collectives: the differentiable ones. sharding: how a parameter is cut, said once.
layers, loss: what is split. randomness: numbers with an address. Read topology, sharding and layers, in this order.
"""
