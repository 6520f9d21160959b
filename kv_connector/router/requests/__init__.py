"""Requests: the bodies that clients send, what engines answer to them, and the streams they answer with."""
