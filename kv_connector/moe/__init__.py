"""Dispatch and combine of a mixture of experts between ranks: GPUs of one machine, or host memory of several.

Each token goes to the ranks that own one of its experts, and comes back as a sum.
"""
