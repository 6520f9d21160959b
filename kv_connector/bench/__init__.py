"""`kv-connector bench`: measures our transfers beside the machine's own limits and other projects, in one
run."""
