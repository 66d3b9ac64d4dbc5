"""Scoring of a token stream by a named protocol. Every token is scored once; sums are float64.

protocol: the settings of a way of scoring. modes: a class for each mode, and the table of them. walk: how a text is
cut. chain: the memory of many segments that are read at once. reader: a model and the text that it reads. score: the
sum over a text. Read modes first.
"""
