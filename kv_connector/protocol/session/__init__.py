"""The sessions with peers: the handshake, heartbeats and the end of each session."""
