"""Programs that we start: each in a session of its own, ended with everything it started, or as an ordinary user.

Knows nothing of sandboxes, tools or what the programs do.
"""
