"""`latent_attention`: attention of single queries to what keys and values are expanded from."""

from moe_runtime.kernels.latent_attention.op import Tokens, latent_attention

__all__ = ["Tokens", "latent_attention"]
