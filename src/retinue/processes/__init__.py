"""Programs that we start: each in a session of its own, ended with everything it started.

Knows nothing of sandboxes, tools or what the programs do.
"""
