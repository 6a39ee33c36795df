"""Safe file primitives: opening below a folder, atomic replacement, private files, small files, folder trees.

Knows paths, descriptors and bytes; nothing of runs, profiles or settings.
"""
