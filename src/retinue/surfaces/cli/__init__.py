"""The command line: `main` has the table of commands. The module of a command is imported when the command is used."""
