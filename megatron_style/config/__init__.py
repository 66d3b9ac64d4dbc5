"""What a run is: the run file and the ds_config, read, checked and frozen. No torch.

section: strict sections and their messages. yaml_file: YAML in and out. model: what a model is. run: the sections of
RUN.yaml. ds_keys: what happens to each key of a ds_config; ds_file: the file. Read run first.
"""
