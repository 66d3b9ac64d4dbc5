"""What a model is good for: scoring text and writing it.

scoring: perplexity by a named protocol, a class for each mode. by_position: the loss by position. held_out: during
training. decoder: token by token without computing anything twice. next_token, sampling, beams, greedy: the next
tokens. writer: text for prompts and typed lines. Read scoring and decoder first.
"""
