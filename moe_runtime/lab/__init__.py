"""Recorded routing: traces, their replay under other policies, reports, and simulated machines."""
