"""The foundation of every other package; it imports none of them, and no torch.

errors: the exceptions, and text that is safe to print. command: flags, exit codes, results and logs. files: atomic
files and folders. run_folder: the names of a run's files. events: the lines of `metrics.jsonl`. findings: the results
of a check. json_text: parsing of untrusted JSON. launchers: the environment variables of each launcher. terminal: a
progress bar that other output does not tear. units: formatting of amounts. launches: the starts of a run. cpu: what
this machine's CPU can do. Read errors and command first.
"""
