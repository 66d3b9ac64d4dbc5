"""A form of model: a folder for the transformers library.

folder: it is read, written and certified here. tokenizer: our tokenizers as the library's, and back.
modeling_shortformer: the model's code, which is copied into the folder and imports nothing from this project.
"""
