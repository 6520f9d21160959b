"""Placement: the choice of engines for a request."""
