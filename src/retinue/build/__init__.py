"""The composition root: the only package that names concrete backends. Each backend is imported when it is needed.

The functions take values (a folder, profiles, a model name) and return the objects they build. They read files only if
a name or a project refers to them.
"""
