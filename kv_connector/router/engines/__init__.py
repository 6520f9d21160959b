"""Engines: which engines exist, what each has to compute, and how the router connects to them."""
