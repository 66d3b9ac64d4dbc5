"""What one process does with its device, whatever the grid.

products: matrix products by the fastest kernel that torch has. peak_memory: what the process has used at most.
phase_times: the time of the phases of a step.
"""
