"""The composition root: the only package that names concrete backends. Each is loaded when it is asked for.

Its functions take values (a folder, profiles, a model name) and return what they build. Nothing here reads a file
unless a name or a project says so.
"""
