"""The forms a model can have, and the way from one to another, with proof.

formats: the table of them. source: a model in whatever form. model_folder, run_checkpoint, fairseq, universal,
huggingface (with its tokenizer and the exported modeling_shortformer): the forms. transfer, certificate: writing with
proof. start: a run that begins with a model. Read formats and source first.
"""
