"""Detect the launcher, and ask other hosts over ssh.

launcher: what started this process, and its device. hosts: the hostfile, and questions over ssh. probe: the answers of
a host. diagnosis: whether a launch there would fail. forwarded_environment: the variables that ssh does not forward.
carrier, holder: how secrets among them reach other hosts. board: memory that the processes of a host share. Read
launcher first.
"""
