"""Estimates of a run before it is started: memory, arithmetic, communication, time. No torch.

parts: the costs of attention, feed-forward and vocabulary, one class for each kind. setup, text, hardware: what is
planned, on which text, on which GPUs. memory, traffic, timing: sums over the parts. saving: checkpoints. estimate: a
complete run. rows, picture: how it is shown. calibration: the efficiency that a run has reached. Read parts/, then
estimate.
"""
