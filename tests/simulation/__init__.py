"""A deterministic simulator of whole clusters: the shipped state machines in a model of their surroundings.

docs/contribute/simulation.md describes what is real, what is modelled and what is checked. Options:
`python -m tests.simulation --help`.
"""
