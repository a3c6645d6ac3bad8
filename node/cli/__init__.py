"""The command line: options shared by all commands, output, signals. `commands` has a file for each command."""
