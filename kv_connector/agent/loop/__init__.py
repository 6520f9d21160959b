"""The agent's thread, and how it carries out the decisions of the state machines."""
