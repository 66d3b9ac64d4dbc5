"""From input files to texts: each format is one small reader over a library that others keep.

inputs: files, globs and folders to a list of files with their formats. chunks: a file in parts, made in one process.
share: the part of a file that is held out. parse: a part to texts, in a worker. compression, columns: the libraries.
Read inputs and chunks first.
"""
