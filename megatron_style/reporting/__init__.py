"""Runs read back, compared and drawn as one HTML page. No torch, no scripts in the page.

history: a run as it was recorded. comparison: of runs. page: the document; charts, bars, svg, scale, style, tables,
markup: its parts. Read history, then page.
"""
