"""The control plane's sockets, who is let in with which key, and the registration with routers."""
