"""The command line: `main` has the table of commands, each command is a module that is loaded when it is asked for."""
