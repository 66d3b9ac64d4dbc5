"""The language model, as a function: tokens and a memory in, losses and the next memory out.

shortformer: the forward pass. memory: what a segment remembers. caches: the place of memories between their uses.
compression: what becomes of tokens that leave a memory. documents: which tokens do not see each other. attention: its
kinds, by `positions`. routing: its kind within clusters. kernels/: their computation. block, positions, vocabulary.
Read memory, attention, block and shortformer, in this order.
"""
