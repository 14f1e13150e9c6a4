"""The expert store: tiers of slots, filled from the files of a checkpoint."""
