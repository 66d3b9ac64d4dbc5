"""Detect ranks that die and hosts that vanish, and resume their runs.

run_guard: lock, log and heartbeat around a run. heartbeat, record, process, lock, rank_log: their parts. signals, stop:
leaving early. launch: a launcher whose signals reach the run. supervisor, cluster: starting a run again. finished: a
run that has nothing left to do. Read run_guard and supervisor first.
"""
