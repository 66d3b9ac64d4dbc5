"""The checkpoints of a run: written atomically, checked before they are read, resumed on any grid.

store: saves and finds them. draft: completes a save. rank_files: what one rank writes, at once or in the background.
caches: the part of a checkpoint that is not DeepSpeed's. folder: names, and which ones are kept. manifest: what a
checkpoint says about itself. logical: reads one as unsharded tensors. origin: where a run begins. proof: compares a
save with the engine. reshard: for another grid. Read store first.
"""
