"""The sockets of the control plane, their authentication, and the registration with routers."""
