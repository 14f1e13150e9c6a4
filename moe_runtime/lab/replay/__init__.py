"""What caching policies, predictors and prefetching would have made of a trace."""
