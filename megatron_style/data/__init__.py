"""From text files to batches, without torch.

readers: input files to texts. preparation: texts to token stores, in parallel. tokenizer,
word_dictionary, pretrained: text to ids and back. store, index, index_writer, documents: the files of a store.
inspection: what is known of all its ids. corpus: the stores of a run and their tokenizer. batch: inputs and targets.
text, progress: what they share. Read store and corpus first.
"""
