"""What two workers agree on, and how a request goes: no socket, thread or clock."""
