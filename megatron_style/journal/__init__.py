"""Record a run and show its progress.

journal: what is recorded when. opening: what a launch records of itself. metrics_file: `metrics.jsonl`. tensorboard:
event files made from it. event_file: one of these. hparams: tables of settings and the layout of charts. console: lines
and the progress bar. farewell: the last lines. work: FLOPs and totals. stragglers: the times of ranks. Read journal
first.
"""
