"""The command line: a module or a folder for each command, put together in main.py. ``common`` has what
they use."""
