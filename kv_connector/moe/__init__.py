"""Dispatch and combine of a mixture of experts between the ranks of one machine.

Each token goes to the ranks that own one of its experts, and comes back as a sum.
"""
