"""Reads runs back, compares them and draws them as one HTML page. No torch, no scripts in the page.

history: a run as it was recorded. facts: what it is and how it ended. comparison: stages, and several runs. page: the
document; charts, bars, svg, readouts, scale, style, tables, markup: its parts. Read history, then page.
"""
