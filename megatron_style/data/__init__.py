"""From text files to batches. No torch.

text, tokenizer, encode, workers: text to token ids, on many processes. prepare: all of it, with a record. store: the
`.bin` and `.idx` files. corpus: the stores of a run and their tokenizer. batch: a batch of them. corpora, download: the
built-in ones. Read store and corpus first.
"""
