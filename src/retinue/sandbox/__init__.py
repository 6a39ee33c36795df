"""Sandboxes: in process, with bubblewrap, in a container. Also the tool server, its session on the host, and the
proxy.
"""
