"""Control over loopback: the server in the process that runs trees, the client in every other."""
