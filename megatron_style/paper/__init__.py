"""The paper's tables, measured: an application on top of the other rooms, which uses the commands as processes.

tables: the paper's twelve, with its figures. measures, claims: what is measured of a run, and what the paper says of
it. scale, runs, corpus: how large, which run files, which text. experiment, jobs, sharing: what is done already, and
doing the rest. memory: rows that fit a GPU. page: the results. No torch. Read tables, then experiment.
"""
