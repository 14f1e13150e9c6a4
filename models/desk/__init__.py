"""The desk model: a trained Mixture-of-Experts language model whose experts are as large as real
ones. `train.toml` trains it on the pocket model's texts; `evaluate.py` writes its card."""
