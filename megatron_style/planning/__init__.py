"""Estimates of a run before it is started: memory, arithmetic, communication, time. No torch."""
