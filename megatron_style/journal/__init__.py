"""Record a run and show its progress.

journal: what is recorded when. metrics_file: `metrics.jsonl`. tensorboard: event files made from it. console: lines
and the progress bar. farewell: the last lines. work: FLOPs and totals. Read journal first.
"""
