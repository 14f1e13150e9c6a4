"""Records of weights and optimizer states, in memory and on the disk."""
