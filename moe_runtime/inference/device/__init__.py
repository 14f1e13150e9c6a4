"""Experts of a model on a device: in its slots, in one launch, and the tiers that feed them."""
