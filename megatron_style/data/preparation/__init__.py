"""`prepare`: input files to token stores, their tokenizer and a record.

flags: the recipe. prepare: the complete preparation. build: a tokenizer of the training text. passes: over all chunks
of a text. encode, words: what a worker does with a chunk. provisional, work: what is on the disk meanwhile. workers: a
parallel map. corpora, download: the built-in corpora. Read prepare, then build and passes.
"""
