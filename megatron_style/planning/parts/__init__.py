"""The parts of a model, each with its costs: attention, feed-forward and vocabulary.

micro_batch: what costs are computed for. attention (with compressive and routed), feed_forward, vocabulary: a class for
each kind. model: the tables of kinds, and the parts of one model. Read micro_batch and attention first.
Symbols: D hidden size, L segment length, C the length of the memory before it, S their sum, e bytes per weight.
"""
