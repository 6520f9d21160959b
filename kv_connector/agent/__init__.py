"""One worker's agent: the thread that owns sockets, engine events and deadlines, and the reports it makes."""
