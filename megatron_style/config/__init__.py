"""The settings of a run: the run file and the ds_config, read, checked and frozen. No torch.

section: strict sections and their messages. yaml_file: YAML in and out. model: the settings of a model. run: the
sections of RUN.yaml, data: that of its text; run_file: the file, paths: those in it. ds_keys: the verdict on each key
of a ds_config; ds_file: the file. Read run first.
"""
