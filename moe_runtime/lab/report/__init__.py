"""Reports on a trace or on a run's statistics: one self-contained page, and plots."""
