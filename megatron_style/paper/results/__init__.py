"""The results of an experiment, as a page with charts and the records of every number.

presented: a table with its figures. curves, charts: what is drawn, and how. keeping: the records of a run, made small.
page: all of it. Read presented, then page.
"""
