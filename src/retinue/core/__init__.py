"""The vocabulary as frozen values and the ports as Protocols. No I/O, no clock, no threads."""
