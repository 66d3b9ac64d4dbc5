"""The same model written down plainly, operation by operation as the paper's own code does it: the mark to be ahead of.

Masks and attention weights are whole matrices, positions are gathered for every row and added to all keys before they
are projected, the adaptive softmax normalises whole bands, and the optimizer walks from parameter to parameter.
"""
