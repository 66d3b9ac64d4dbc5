"""Measures the paper's tables: an application on top of the other rooms, which runs the commands as processes. No
torch."""
