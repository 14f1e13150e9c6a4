"""Experts in the memory of a GPU: slots, copies on streams, and leases of queued work."""
