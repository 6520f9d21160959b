"""The agreement between two workers, and the course of a request: no socket, thread or clock."""
