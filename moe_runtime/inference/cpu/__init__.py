"""Layers of transformers in the form in which a CPU computes small batches fastest."""
