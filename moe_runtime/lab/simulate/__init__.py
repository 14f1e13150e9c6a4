"""Simulated machines: layers, serving and training."""
