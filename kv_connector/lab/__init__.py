"""Engines and routers as processes of this machine, and small models: for demo, bench and tests."""
