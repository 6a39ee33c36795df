"""Control over loopback: the server in the process that runs trees, and the client in all other processes."""
