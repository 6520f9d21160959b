"""Bodies: parsing of the JSON that clients send, without a copy and outside the event loop."""
