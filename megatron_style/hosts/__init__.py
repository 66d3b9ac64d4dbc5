"""Launchers, other hosts, and what they answer.

launcher: who started this process, and on what it computes. hosts: the hostfile, and questions over ssh. probe: what a
host answers. diagnosis: whether a launch there would fail. forwarded_environment: the variables that ssh does not carry
over. Read launcher first.
"""
