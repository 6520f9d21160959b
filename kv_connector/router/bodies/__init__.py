"""Bodies: the JSON that clients send, parsed without a copy and beside the event loop."""
