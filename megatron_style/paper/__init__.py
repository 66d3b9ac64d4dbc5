"""The paper's tables, measured: an application on top of the other rooms, which uses the commands as processes.

tables: the paper's twelve, with its figures. measures, claims (with judgement): what is measured of a run, and what the
paper says of it. scale, runs, corpus: how large, which run files, which text. experiment: what is done already. work:
doing the rest. memory: rows that fit a GPU. speeds: those measured apart. results: the page. No torch. Read tables,
then experiment.
"""
