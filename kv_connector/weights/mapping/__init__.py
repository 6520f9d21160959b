"""The map from a checkpoint to engines: what they load, and which rank writes what where."""
