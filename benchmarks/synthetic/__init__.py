"""Checkpoints with random weights in the shapes of published models."""
