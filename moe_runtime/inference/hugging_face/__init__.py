"""What a loaded model is to transformers: a backend of its experts, and its public methods."""
