"""Experts that a device lacks, and who computes them: the device after a copy, or the CPU."""
