"""The shape of a language model."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from moe_runtime.config import is_number


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertsConfig:
    """The routed feed-forward of the layers that have one: the arguments of `MoELayer`."""

    num_experts: int
    top_k: int  # experts a token goes to
    intermediate_size: int  # hidden width of one expert
    gate: str = "softmax_topk"
    gate_options: Mapping[str, Any] = field(default_factory=dict)
    activation: str = "swiglu"
    bias: bool = False
    shared_experts: int = 0  # experts for every token, each as wide as a routed one
    shared_expert_gate: bool = False  # a sigmoid gate on the shared experts' output
    capacity_factor: float | None = None  # None never drops a token
    drop_policy: str = "choice"  # which choices are kept if capacity is limited
    num_groups: int = 1  # consecutive parts of the batch, routed separately
    zero_experts: Mapping[str, int] | None = None  # of MoE++, by kind: `zero`, `copy`, `constant`
    impl: str = "auto"  # implementation: `auto`, `native`, `triton`, `torch`, `reference`
    recompute: bool = False  # the backward pass recomputes the experts' pre-activations
    # coefficients of the auxiliary losses by name; None takes the gate's own. The loss is the mean
    # over the routed layers.
    loss_weights: Mapping[str, float] | None = None
    # ScMoE: layers come in pairs, a dense one and one with experts, whose routed experts read the
    # pair's `input`, its `middle` (after the first attention, which the paper recommends) or the
    # first layer's `output` instead of their own layer's representation; the shared experts read
    # that. None reads what comes, as usual.
    shortcut: Literal["output", "middle", "input"] | None = None

    def __post_init__(self) -> None:
        # the layer checks the rest when it is built
        _require_positive(self, "num_experts", "top_k", "intermediate_size")
        if self.shortcut is None:
            return
        if self.shared_experts < 1:
            raise ValueError(f"shortcut needs shared_experts >= 1, got {self.shared_experts}")
        if self.shared_expert_gate:
            raise ValueError("shortcut adds the shared experts as they are: no shared_expert_gate")


@dataclass(frozen=True, kw_only=True, slots=True)
class LanguageModelConfig:
    """A decoder: embedding, blocks of attention and feed-forward, norm, output projection."""

    hidden_size: int  # width of the residual stream
    num_layers: int
    num_heads: int
    num_kv_heads: int  # key-value heads; divides `num_heads`
    head_dim: int  # width of a head; even
    max_positions: int  # longest context in tokens
    vocab_size: int | None = None  # entries of the vocabulary; None until the tokenizer is known
    moe: ExpertsConfig | None = None  # the routed feed-forward; None makes a dense model
    intermediate_size: int | None = None  # of dense layers
    dense_layers: tuple[int, ...] = ()  # layers that stay dense in a model with experts
    tie_embeddings: bool = True  # the output projection is the embedding
    rope_theta: float = 10_000.0  # base of the rotary position embedding
    norm_eps: float = 1e-6  # added to the mean square in the norms
    init_std: float = 0.02  # standard deviation of the initial weights

    def __post_init__(self) -> None:
        _require_positive(
            self, "hidden_size", "num_layers", "num_heads", "num_kv_heads", "head_dim"
        )
        _require_positive(self, "max_positions", "rope_theta", "norm_eps", "init_std")
        if self.vocab_size is not None:
            _require_positive(self, "vocab_size")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads ({self.num_heads}) must be a multiple of num_kv_heads, "
                f"got {self.num_kv_heads}"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim must be even for rotary positions, got {self.head_dim}")
        self._check_feed_forward()

    def _check_feed_forward(self) -> None:
        if self.moe is not None and self.moe.shortcut is not None:
            if self.num_layers % 2:
                raise ValueError(
                    f"num_layers must be even for moe.shortcut, which pairs them, "
                    f"got {self.num_layers}"
                )
            if self.dense_layers:
                raise ValueError("moe.shortcut makes every other layer dense: omit dense_layers")
        for layer in self.dense_layers:
            if not 0 <= layer < self.num_layers:
                raise ValueError(f"dense_layers must lie in 0..{self.num_layers - 1}, got {layer}")
        if self.dense_layers and self.moe is None:
            raise ValueError("dense_layers names layers of a model with experts; moe is not given")
        if any(not self.is_routed(layer) for layer in range(self.num_layers)):
            if self.intermediate_size is None:
                raise ValueError("intermediate_size is needed: the model has dense layers")
            _require_positive(self, "intermediate_size")

    def is_routed(self, layer: int) -> bool:
        """Whether the feed-forward of a layer is a mixture of experts."""
        if self.moe is not None and self.moe.shortcut is not None:
            return layer % 2 == 1
        return self.moe is not None and layer not in self.dense_layers


def _require_positive(config: object, *names: str) -> None:
    for name in names:
        value = getattr(config, name)
        if not (is_number(value) and value > 0):
            raise ValueError(f"{name} must be a positive number, got {value!r}")
