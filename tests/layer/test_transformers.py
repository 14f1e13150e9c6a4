"""Training with the layer in the place of transformers' own block: the same losses."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moe_runtime.layer import MoELayer, export_state, import_state

VOCAB, D, INTER, E, K, STEPS = 32, 24, 20, 8, 2, 30


class TinyModel(nn.Module):
    """An embedding, two routed blocks, and the embedding again."""

    def __init__(self, blocks: list[nn.Module]) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, D)
        self.blocks = nn.ModuleList(blocks)
        self.norms = nn.ModuleList(nn.RMSNorm(D) for _ in blocks)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for norm, block in zip(self.norms, self.blocks, strict=True):
            x = x + block(norm(x))
        return x @ self.embedding.weight.T


def losses_of(model: nn.Module) -> list[float]:
    """Steps on a fixed rule: the next token is a function of the present one."""
    generator = torch.Generator().manual_seed(1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(STEPS):
        ids = torch.randint(VOCAB, (4, 16), generator=generator)
        loss = F.cross_entropy(model(ids).flatten(0, 1), (ids * 5 + 3).flatten() % VOCAB)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_same_loss_curve():
    """fp32, 1e-4: rounding alone differs, and so few steps do not amplify it beyond that."""
    from transformers import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        hidden_size=D,
        moe_intermediate_size=INTER,
        num_experts=E,
        num_experts_per_tok=K,
        norm_topk_prob=False,
        experts_implementation="eager",
    )
    blocks = [Qwen3MoeSparseMoeBlock(config) for _ in range(2)]
    for block in blocks:
        for parameter in block.parameters():
            nn.init.normal_(parameter, std=0.2)
    theirs = TinyModel(list(blocks))
    layers = [MoELayer(D, INTER, E, K, gate_options={"renormalize": False}) for _ in range(2)]
    for layer, block in zip(layers, blocks, strict=True):
        # transformers' names and shapes are the layer's own
        layer.load_state_dict(block.state_dict())
    ours = TinyModel(list(layers))
    ours.embedding.load_state_dict(theirs.embedding.state_dict())
    expected, got = losses_of(theirs), losses_of(ours)
    assert expected[-1] < 0.7 * expected[0], "nothing was learned, which proves little"
    assert got == pytest.approx(expected, rel=1e-4, abs=1e-4)


def test_per_expert_layout_is_that_of_saved_checkpoints(tmp_path):
    """What `save_pretrained` writes for one block imports, and exports under the same names."""
    from safetensors.torch import load_file
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(
        vocab_size=VOCAB,
        hidden_size=D,
        moe_intermediate_size=INTER,
        intermediate_size=INTER,
        num_experts=4,
        num_experts_per_tok=K,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        norm_topk_prob=True,
    )
    model = Qwen3MoeForCausalLM(config)
    model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    layer = MoELayer(D, INTER, 4, K)
    prefix = "model.layers.0.mlp."
    import_state(layer, tensors, "hugging_face", prefix)
    x = torch.randn(2, 7, D)
    torch.testing.assert_close(layer(x), model.model.layers[0].mlp(x))
    exported = export_state(layer, "hugging_face", prefix)
    assert exported.keys() == {name for name in tensors if name.startswith(prefix)}
    assert all(torch.equal(exported[name], tensors[name]) for name in exported)
