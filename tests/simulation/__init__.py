"""A deterministic simulator of whole clusters: the state machines that ship, everything around them modelled.

docs/reliability.md says what is real, what is modelled and what is checked. `python -m tests.simulation
--help`.
"""
