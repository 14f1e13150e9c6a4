"""Reports: what a trace or a run's statistics say, as one self-contained page and as plots."""
