"""`kv-connector bench`: our transfers beside the machine's own limits and other projects, in one run."""
