"""Streams: requests in flight, from the choice of engines to the end of the answer."""
