"""The command line. Each command is one file, imported when it is called."""
