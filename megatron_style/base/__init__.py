"""The foundation of every other package; it imports none of them, and no torch.

errors: the exceptions, and text that is safe to print. command: flags, exit codes, results, findings and logs. files:
atomic files and folders, full disks. run_folder: the names of a run's files. model_files: those of a model's. events:
the lines of `metrics.jsonl`. launches: the starts of a run. json_text: parsing of untrusted JSON. launchers: the
environment variables of each launcher. terminal: a progress bar that other output does not tear. units: formatting of
amounts. cpu: what this machine's CPU can do. Read errors and command first.
"""
