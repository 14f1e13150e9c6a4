"""A small decoder language model built on the drop-in layer.

Its blocks compute what Qwen3 and Qwen3-MoE compute, so that a trained model leaves as an exact
Hugging Face checkpoint. Importing this package is light; the parts lie in its modules.
"""
