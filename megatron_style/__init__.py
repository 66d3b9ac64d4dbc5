"""A trainer for Shortformer language models on DeepSpeed."""

__version__ = "0.1.0"
