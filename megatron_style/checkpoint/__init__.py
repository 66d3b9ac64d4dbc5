"""The checkpoints of a run: written atomically, checked before they are read, resumed on any grid.

store: saving and finding them. manifest: what a checkpoint says about itself. logical: one as complete tensors by name.
origin: where a run begins. proof: a save compared with the engine. reshard: for another grid. Read store first.
"""
