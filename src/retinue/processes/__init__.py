"""Starting and ending programs: each in its own session, ended with all its children, or run as an ordinary user.

Knows nothing of sandboxes or tools.
"""
