"""Message formats shared by both ends of a connection. No I/O."""
