"""The processes that do the work: loops, signals, the keeper of leases."""
