"""What every other room stands on; it imports none of them, and no torch.

errors: what goes wrong, in one line each. command: flags, exit codes, results and logs. files: files and folders that
appear complete or not at all. run_folder: the names of a run's files. events: what `metrics.jsonl` holds. findings:
what a check has found. launchers: their variables. terminal: a progress bar that other output does not tear. units:
amounts as people read them. Read errors and command first.
"""
