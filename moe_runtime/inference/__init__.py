"""Loading a checkpoint with its experts left on disk, and running it."""
