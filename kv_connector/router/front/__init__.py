"""Front: the router's HTTP server, its routes and status page, and the registration of engines."""
