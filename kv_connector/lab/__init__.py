"""Engines and routers as processes of this machine, small models, measurements: for demo, bench, tests."""
