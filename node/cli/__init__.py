"""The command line: options shared by all commands, output, signals. `commands` has a file for each command.

May use `web` and the rooms before it: here the parts of a process are put together.
"""
