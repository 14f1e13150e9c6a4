"""Sparse materialisation of experts for every batch (Hecate)."""
