"""What a loaded model will need next: gates, predictors, and the prefetcher that asks them."""
