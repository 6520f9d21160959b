"""The plan of a transfer: which bytes go where, and which rank sends them."""
