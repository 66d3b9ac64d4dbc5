"""kNN-LM: a datastore of the keys and next tokens of a text, and its mixture with a model's predictions.

store: the files. build: a walk through the text that writes them. search: exact search. approximate: search by an index
of faiss. mixture: the formulas. retrieval: datastore, search and mixture together, for texts to score and texts to
generate. arguments: their flags. Read mixture, search and retrieval first.
"""
