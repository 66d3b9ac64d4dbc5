"""Scoring and generating text with a model.

scoring: perplexity by a named protocol, a class for each mode. measure: scores, with the time and memory they take.
by_position: the loss by position. held_out: scores during training. decoder: token by token with cached keys and
values. next_token, sampling, beams, greedy: the choice of the next token. prompts, writer: text for prompts and typed
lines. arguments: the flags of a walk. Read scoring and decoder first.
"""
