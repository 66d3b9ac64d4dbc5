"""From text files to batches, without torch.

text, tokenizer, encode, workers: text to token ids, in parallel. progress: its progress bar. prepare: the complete
preparation, with a record. store, index: the `.bin` and `.idx` files. inspection: what is known of all ids. corpus: the
stores of a run and their tokenizer. batch: inputs and targets. corpora, download: the built-in corpora. Read store and
corpus first.
"""
