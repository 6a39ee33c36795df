"""Sandboxes: in process, behind bubblewrap, in a container; the tool server inside, its session on the host, and the
network proxy."""
