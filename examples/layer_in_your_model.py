"""A feed-forward network replaced by a Mixture-of-Experts layer in a model of your own.

python examples/layer_in_your_model.py
"""

import torch
from torch import nn

from moe_runtime import MoELayer


class Block(nn.Module):
    """A residual block whose feed-forward network has experts.

    Shapes: x_BTD, batch by tokens by model width.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.experts = MoELayer(
            hidden_size=width,
            intermediate_size=2 * width,
            num_experts=8,
            top_k=2,
            loss_weights={"load_balance": 0.01},
        )

    def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:
        return x_BTD + self.experts(self.norm(x_BTD))


def main() -> None:
    """Fits random targets for a few steps; the loss falls."""
    torch.manual_seed(0)
    model = nn.Sequential(Block(32), Block(32))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    x_BTD, target_BTD = torch.randn(4, 16, 32), torch.randn(4, 16, 32)
    for step in range(20):
        loss = nn.functional.mse_loss(model(x_BTD), target_BTD)
        balance = torch.stack([block.experts.aux.loss for block in model]).sum()
        optimizer.zero_grad()
        (loss + balance).backward()
        optimizer.step()
        if step % 19 == 0:
            print(f"step {step}: loss {loss.item():.3f}, load {model[0].experts.aux.max_load:.2f}")


if __name__ == "__main__":
    main()
