"""The soak: real engines and a router under a mixed load with faults, and the growth of each process."""
