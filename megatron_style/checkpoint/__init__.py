"""The checkpoints of a run: written atomically, checked before they are read, resumed on any grid.

store: saves and finds them. manifest: what a checkpoint says about itself. logical: reads one as unsharded tensors.
origin: where a run begins. proof: compares a save with the engine. reshard: for another grid. Read store first.
"""
