"""P's side of every transfer, and the prefixes that it lends."""
