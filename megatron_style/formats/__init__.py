"""The forms that a model can have, and conversion between them, with proof.

formats: the table of forms. source: a model in any of them. model_folder, run_checkpoint, fairseq, transformer_xl,
universal, huggingface: the forms. transfer, certificate: conversion and its proof. start: a run that begins with a
model. Read formats and source first.
"""
