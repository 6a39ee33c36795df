"""HTTP/1.1 over asyncio streams, parsed by `h11`: one server connection, one client connection, one loopback listener.

Knows no routes, no commands and no JSON shapes. Every read has a limit in bytes and in time.
"""
