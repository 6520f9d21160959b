"""The records of the agent: ended requests, counts, timelines and log lines."""
