"""What a run records, and how it is watched.

journal: what is recorded when. metrics_file: `metrics.jsonl`. tensorboard: its events, made from that file. console:
the lines and the progress bar. work: arithmetic done. Read journal first.
"""
