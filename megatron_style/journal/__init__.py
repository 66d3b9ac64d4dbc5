"""Record a run and show its progress.

journal: what is recorded when. opening: what a launch records of itself. metrics_file: `metrics.jsonl`. tensorboard:
event files made from it. hparams: its tables of settings and its layout of charts. console: lines and the progress
bar. farewell: the last lines. work: FLOPs and totals. stragglers: the times of ranks. Read journal first.
"""
