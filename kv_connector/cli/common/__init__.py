"""Modules that commands use and that are no commands: exit statuses, options, files and output."""
