"""Frozen experts in slots, with adapters of low rank: gradients against autograd in fp64, and the
same bits however the experts come.
"""

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from moe_runtime.kernels.expert_mlp import StackedExperts
from moe_runtime.kernels.operands import ActivationSpec

pytest.importorskip("triton")

from moe_runtime.kernels.expert_mlp.slotted import LowRank, SlottedTraining

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
T, K, E, D, F, L, SCALE = 9, 2, 5, 24, 20, 3, 1.5
SPEC = ActivationSpec("silu", alpha=1.702, limit=7.0, up_offset=1.0)


class Case:
    """Experts, inputs and adapters; a layout like gpt-oss's or like Mixtral's."""

    def __init__(
        self, dtype: torch.dtype, *, gpt_oss: bool, has_low: bool, num_tokens: int = T
    ) -> None:
        generator = torch.Generator().manual_seed(3)

        def drawn(*shape: int, scale: float = 0.5) -> Tensor:
            values = scale * torch.randn(*shape, generator=generator)
            return values.to(DEVICE, dtype)

        up, down = drawn(E, 2 * F, D), drawn(E, D, F)
        biases = (drawn(E, 2 * F), drawn(E, D)) if gpt_oss else (None, None)
        if gpt_oss:
            up, down = up.mT.contiguous(), down.mT.contiguous()
        self.experts = StackedExperts(
            gate_up=up, down=down, gate_up_bias=biases[0], down_bias=biases[1],
            is_transposed=gpt_oss, is_concatenated=not gpt_oss,
        )  # fmt: skip
        self.x_TD, self.grad_TD = drawn(num_tokens, D), drawn(num_tokens, D)
        self.weights_TK = drawn(num_tokens, K).abs()
        # one expert without rows, and choices of none
        ids = torch.randint(0, E - 1, (num_tokens, K), generator=generator)
        ids[:, 1] = torch.where(ids[:, 0] == ids[:, 1], E + 1, ids[:, 1])
        self.ids_TK = ids.to(DEVICE)
        shapes = ((L, D), (2 * F, L), (L, F), (D, L)) if has_low else ()
        self.adapters = [nn.Parameter(drawn(E, *shape).float()) for shape in shapes]

    def computed(self, parts: list[list[int]], *, steps: int = 1) -> list[Tensor]:
        """Output and gradients of `steps` calls, experts given in these parts."""
        for parameter in self.adapters:
            parameter.grad = None
        found = list[Tensor]()
        for _ in range(steps):
            low: tuple[LowRank | None, LowRank | None] = (None, None)
            if self.adapters:
                one, two, three, four = self.adapters
                low = (LowRank(one, two, SCALE, self.x_TD), LowRank(three, four, SCALE, self.x_TD))
            call = SlottedTraining(self.x_TD, self.ids_TK, self.weights_TK, E, SPEC)
            call.begin_forward(2 * F, low, keeps=True)
            for stack in map(self.only, parts):
                call.forward(stack)
            out_TD = call.output()
            call.take_tensors(*call.give_up_tensors())
            call.begin_backward(self.grad_TD, low)
            for stack in map(self.only, parts):
                call.backward(stack)
            found = [out_TD, *call.input_gradients()]
        return [*found, *(p.grad for p in self.adapters if p.grad is not None)]

    def only(self, experts: list[int]) -> StackedExperts:
        """A stack in which the others have no slot, and slots are in another order."""
        slots = torch.full((E,), -1, dtype=torch.int32)
        for expert in experts:
            slots[expert] = E - 1 - expert
        given = self.experts
        turned = {
            name: None if tensor is None else tensor.flip(0)
            for name in ("gate_up", "down", "gate_up_bias", "down_bias")
            for tensor in (getattr(given, name),)
        }
        return replace(given, slot_of_expert=slots.to(DEVICE), **turned)

    def wanted(self) -> list[Tensor]:
        """By autograd, in fp64, with the adapters merged."""
        leaves = [t.detach().double().requires_grad_() for t in (self.x_TD, self.weights_TK)]
        adapters = [p.detach().double().requires_grad_() for p in self.adapters]
        given = self.experts
        matrices = [given.gate_up.double(), given.down.double()]
        if given.is_transposed:
            matrices = [matrix.mT for matrix in matrices]
        for place in range(len(adapters) // 2):
            first, second = adapters[2 * place : 2 * place + 2]
            matrices[place] = matrices[place] + SCALE * second @ first
        x_TD, weights_TK = leaves
        out_TD = torch.zeros_like(x_TD)
        for t, choices in enumerate(self.ids_TK.tolist()):
            for k, e in enumerate(choices):
                if e >= E:
                    continue
                z_Z = matrices[0][e] @ x_TD[t]
                if given.gate_up_bias is not None:
                    z_Z = z_Z + given.gate_up_bias[e]
                gate, up = given.layout.split(z_Z[None])
                y_D = matrices[1][e] @ SPEC(gate, up)[0]
                if given.down_bias is not None:
                    y_D = y_D + given.down_bias[e]
                out_TD = out_TD.index_add(
                    0, torch.tensor([t], device=DEVICE), (weights_TK[t, k] * y_D)[None]
                )
        out_TD.backward(self.grad_TD.double())
        return [out_TD.detach(), *(leaf.grad for leaf in [*leaves, *adapters])]  # type: ignore[misc]


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize(("gpt_oss", "has_low"), [(False, True), (True, True), (True, False)])
@pytest.mark.parametrize(
    "dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)]
)
def test_gradients_against_fp64_and_the_same_bits_in_parts(dtype, gpt_oss, has_low):
    case = Case(dtype, gpt_oss=gpt_oss, has_low=has_low)
    found, wanted = case.computed([[*range(E)]]), case.wanted()
    assert len(found) == len(wanted) == 3 + 4 * has_low
    limit = 2e-6 if dtype == torch.float32 else 2e-2
    for one, other in zip(found, wanted, strict=True):
        assert (one.double() - other).norm() <= limit * other.norm()
    in_parts = case.computed([[3, 1], [2], [0, 4]])
    assert all(map(torch.equal, found, in_parts))
    for one, two in zip(found[3:], case.computed([[*range(E)]], steps=2)[3:], strict=True):
        torch.testing.assert_close(two, 2 * one)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_same_bits_in_tiles_of_many_rows(dtype):
    """By every call, however the experts come: no sum is made by atomics."""
    case = Case(dtype, gpt_oss=False, has_low=True, num_tokens=64 * T)
    found = case.computed([[*range(E)]])
    for parts in ([[*range(E)]], [[3, 1], [2], [0, 4]]):
        assert all(map(torch.equal, found, case.computed(parts)))
