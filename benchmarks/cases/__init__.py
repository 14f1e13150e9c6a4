"""What each case measures, and how: its systems, a repetition of one, and its metrics."""
