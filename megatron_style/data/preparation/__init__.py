"""`prepare`: input files to token stores, their tokenizer and a record.

flags: the recipe. prepare: the complete preparation. encode: its passes over the text. workers: a parallel map.
corpora, download: the built-in corpora. Read prepare, then encode.
"""
