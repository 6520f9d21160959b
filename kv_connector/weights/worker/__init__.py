"""A worker's side: it decides how a version lands, and receives the version."""
