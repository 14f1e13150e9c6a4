"""Gradients through models whose experts are evicted between the passes, and what has none.

That every parameter of every family has the gradient that transformers computes is in
`test_families`; here are adapters, half precision, checkpointing and what else may be asked.
"""

import copy
from pathlib import Path
from typing import Any

import moe_families
import peft
import pytest
import tiny_checkpoints
import torch
from moe_families import Family
from text_checkpoint import tiny_text_model
from torch.autograd import forward_ad
from transformers import AutoModelForCausalLM

import moe_runtime
from moe_runtime.errors import UnsupportedUseError
from moe_runtime.inference.inspection import inspect_checkpoint
from moe_runtime.inference.steps import LayerRouting, Listener
from moe_runtime.lab.traces.format import read_trace

TOKENS = torch.arange(24).mul(37).remainder(200).view(2, 12)
# Sums in fp32 in another order, forward and back: about the root of a few thousand roundings of
# 6e-8. An expert in the wrong slot leaves 1e-1.
SAME = 2e-5

BY_NAME = {str(family): family for family in moe_families.FAMILIES}
# One of each kind of expert: plain; with biases, interleaved, and a gate of its own; without a
# gate; normalised; clamped; transposed.
KINDS = [
    BY_NAME[name]
    for name in (
        *("MixtralForCausalLM", "GptOssForCausalLM", "NemotronHForCausalLM"),
        *("MuseSparkForConditionalGeneration", "DeepseekV4ForCausalLM", "AriaTextForCausalLM"),
    )
    if name in BY_NAME
]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("text")
    tiny_text_model(200).save_pretrained(folder)
    return folder


def smallest(path: Path, dtype: str = "float32") -> int:
    return inspect_checkpoint(path, dtype=dtype, max_tokens=64).smallest_budget_bytes


def load(path: Path, **options: Any) -> Any:
    settings = {"dtype": "float32", "max_tokens": 64, "device": "cpu"} | options
    settings.setdefault("host_memory", smallest(path, settings["dtype"]))
    return moe_runtime.load(path, **settings)


def input_gradient(model: Any) -> torch.Tensor:
    """Of the loss with respect to the embeddings."""
    embedded = model.get_input_embeddings()(TOKENS).detach().requires_grad_()
    (gradient,) = torch.autograd.grad(model(inputs_embeds=embedded, labels=TOKENS).loss, embedded)
    return gradient


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    return ((found - expected).norm() / expected.norm()).item()


def with_adapters(model: Any) -> Any:
    """LoRA on attention, with adapters that are not zero."""
    torch.manual_seed(0)
    places = ["q_proj", "k_proj", "v_proj", "o_proj"]
    config = peft.LoraConfig(r=4, target_modules=places, init_lora_weights=False)
    return peft.get_peft_model(model, config)


@pytest.mark.parametrize("reentrant", [None, False, True])
def test_inputs_and_adapters_have_the_gradients_of_transformers(checkpoint, reentrant):
    """Without activation checkpointing, and with either kind."""
    found = []
    for model in (load(checkpoint), AutoModelForCausalLM.from_pretrained(checkpoint)):
        for parameter in model.parameters():
            parameter.requires_grad_(False)
        gradients = [input_gradient(model)]
        adapted = with_adapters(model).train()
        if reentrant is not None:
            options = {"use_reentrant": reentrant}
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)
            model.enable_input_require_grads()
        adapted(input_ids=TOKENS, labels=TOKENS).loss.backward()
        gradients += [p.grad for p in adapted.parameters() if p.grad is not None]
        assert len(gradients) == 1 + 3 * 4 * 2
        found.append(gradients)
        if hasattr(model, "moe"):
            model.moe.check()
            model.moe.close()
    for ours, theirs in zip(*found, strict=True):
        assert relative(ours, theirs) < SAME


def test_adapters_of_the_pocket_model_learn_what_they_learn_in_transformers(tmp_path):
    """The losses of a few steps, through 10 of 96 experts at a time; all of it in fp32."""
    theirs = AutoModelForCausalLM.from_pretrained(Path("models/pocket"), dtype=torch.float32)
    theirs.save_pretrained(tmp_path)
    ours = load(tmp_path, host_memory=smallest(tmp_path) + 8 * 400 * 1024)
    losses = []
    for model in (ours, theirs):
        for parameter in model.parameters():
            parameter.requires_grad_(False)
        adapted = with_adapters(model).train()
        trained = [p for p in adapted.parameters() if p.requires_grad]
        optimizer = torch.optim.SGD(trained, lr=0.005)
        losses.append([])
        for _ in range(3):
            loss = adapted(input_ids=TOKENS, labels=TOKENS).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses[-1].append(loss.item())
    with ours.moe:
        assert ours.moe.stats().expert_slots <= 12
        assert losses[0] == pytest.approx(losses[1], rel=1e-4)
        assert losses[0][-1] < 0.99 * losses[0][0]


def test_residency_changes_no_bit_of_a_gradient(checkpoint):
    found = []
    for budget in (smallest(checkpoint), smallest(checkpoint) + (1 << 17), "1GiB"):
        model = load(checkpoint, host_memory=budget)
        with model.moe:
            input_gradient(model)
            found.append(input_gradient(model))
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


def test_gradients_work_after_inference_mode(checkpoint):
    """Every expert is made for the first time within the mode; all stay resident."""
    fresh, used = load(checkpoint, host_memory="1GiB"), load(checkpoint, host_memory="1GiB")
    with fresh.moe, used.moe:
        with torch.inference_mode():
            used(TOKENS)
            used.generate(TOKENS, max_new_tokens=3, do_sample=False)
        assert torch.equal(input_gradient(used), input_gradient(fresh))


@pytest.mark.parametrize("family", KINDS, ids=str)
def test_half_precision_is_no_further_from_the_truth_than_transformers(family, tmp_path):
    check_half_precision(family, tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("family", BY_NAME.values(), ids=str)
def test_half_precision_of_every_family(family, tmp_path):
    check_half_precision(family, tmp_path)


def check_half_precision(family: Family, folder: Path) -> None:
    """Every experts module by itself, in bf16: a whole model would choose other experts.

    Both sides round each product, the gate and the sums to bf16, ours here and there once less:
    errors are of one size, a sum of hundreds of roundings each. Twice that is a wrong rounding. A
    family that computes in fp32 between its products rounds the result alone: one more for ours.
    """
    made = tiny_checkpoints.tiny_model(family).to(torch.bfloat16)
    tiny_checkpoints.save(made, folder, sharded=False)
    theirs: Any = tiny_checkpoints.model_class_of(family).from_pretrained(
        folder, dtype=torch.bfloat16, experts_implementation="eager"
    )
    ours = load(folder, dtype="bfloat16")
    with ours.moe:
        for name, stock in tiny_checkpoints.experts_modules(theirs).items():
            offloaded = ours.get_submodule(name)
            call = random_call(stock)
            found, rounded = module_gradients(offloaded, call), module_gradients(stock, call)
            widened = copy.deepcopy(stock).double()  # two modules may share their weights
            exact = module_gradients(widened, [t.double() for t in call])
            for gradient, theirs_is, truth in zip(found, rounded, exact, strict=True):
                limit = 2 * relative(theirs_is.double(), truth) + torch.finfo(torch.bfloat16).eps
                assert relative(gradient.double(), truth) < limit
        ours.moe.check()


def random_call(experts: Any) -> list[torch.Tensor]:
    """Hidden values, ids, gate weights, and the gradient of the output, in bf16."""
    stacked = experts.gate_up_proj if experts.has_gate else experts.up_proj
    width = stacked.shape[1 if experts.is_transposed else 2]
    weights, ids = torch.rand(16, len(stacked)).topk(2)
    return [
        torch.randn(16, width).bfloat16(),
        ids,
        weights.bfloat16(),
        torch.randn(16, width).bfloat16(),
    ]


def module_gradients(experts: Any, call: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Of hidden values and gate weights."""
    hidden, ids, weights, upstream = call
    leaves = hidden.clone().requires_grad_(), weights.clone().requires_grad_()
    return torch.autograd.grad(experts(leaves[0], ids.long(), leaves[1]), leaves, upstream)


def refused(call: Any, word: str) -> None:
    with pytest.raises(UnsupportedUseError, match=word) as caught:
        call()
    assert "\n" not in str(caught.value)


def test_other_derivatives_are_refused(checkpoint):
    """Second derivatives, forward mode and functional transforms."""
    model = load(checkpoint)
    experts = model.model.layers[0].mlp.experts
    hidden, tangent = torch.randn(5, 64), torch.randn(5, 64)
    weights, ids = torch.rand(5, 8).topk(2)

    def loss(hidden: torch.Tensor) -> torch.Tensor:
        return experts(hidden, ids, weights).square().sum()

    with model.moe:
        leaf = hidden.clone().requires_grad_()
        (expected,) = torch.autograd.grad(loss(leaf), leaf)
        (first,) = torch.autograd.grad(loss(leaf), leaf, create_graph=True)
        assert torch.equal(first, expected)
        assert torch.equal(torch.autograd.functional.vjp(loss, hidden)[1], expected)
        refused(first.square().sum().backward, "first derivatives")
        refused(lambda: torch.autograd.functional.jvp(loss, hidden, tangent), "first derivatives")
        refused(lambda: torch.func.grad(loss)(hidden), "torch.func")
        refused(lambda: torch.func.jvp(loss, (hidden,), (tangent,)), "forward-mode")
        with forward_ad.dual_level(), torch.no_grad():
            refused(lambda: loss(forward_ad.make_dual(hidden, tangent)), "forward-mode")
        model.moe.check()
        (again,) = torch.autograd.grad(loss(leaf), leaf)
        assert torch.equal(again, expected)


def test_a_frozen_step_builds_no_graph(checkpoint):
    """A frozen model, gradients enabled; and tensors of inference mode."""
    model = load(checkpoint)
    experts = model.model.layers[0].mlp.experts
    arguments = [torch.randn(5, 64), torch.tensor([[0, 8], [1, 2], [3, 4], [5, 6], [7, 0]])]
    with model.moe:
        out = experts(*arguments, torch.rand(5, 2))
        assert out.grad_fn is None
        with torch.inference_mode():
            inside = experts(*(argument.clone() for argument in arguments), torch.rand(5, 2))
        assert inside.is_inference()
        assert model(TOKENS).logits.grad_fn is None


def test_skipped_slots_have_no_gradient(checkpoint):
    """Ids of no expert: expert parallelism marks the slots of others so."""
    model = load(checkpoint)
    experts = model.model.layers[0].mlp.experts
    hidden, weights = torch.randn(3, 64, requires_grad=True), torch.rand(3, 2, requires_grad=True)
    ids = torch.tensor([[0, 8], [8, 8], [3, 1]])
    with model.moe:
        grads = torch.autograd.grad(experts(hidden, ids, weights).sum(), (hidden, weights))
        alone = torch.autograd.grad(
            experts(hidden[:1], ids[:1, :1], weights[:1, :1]).sum(), (hidden, weights)
        )
    assert torch.equal(grads[0][1], torch.zeros(64))
    assert torch.equal(grads[1] == 0, ids == 8)
    # two choices are summed here, one of them is zero
    assert torch.equal(grads[0][0], alone[0][0])


def test_listeners_get_no_backward_pass(checkpoint, tmp_path):
    """Neither of the experts that it leases, nor of layers that checkpointing computes again."""
    told = []

    class Told(Listener):
        wants_routing = wants_demands = True

        def routed(self, routing: LayerRouting) -> None:
            told.append(("routed", routing.layer))

        def demanded(self, routing: LayerRouting) -> None:
            told.append(("demanded", routing.layer))

    model = load(checkpoint, trace=tmp_path / "trace.npz", prefetch="observe").train()
    model.model.embed_tokens.weight.requires_grad_(True)
    model.gradient_checkpointing_enable()
    model._steps.listeners.add(Told())
    with model.moe:
        loss = model(input_ids=TOKENS, labels=TOKENS).loss
        misses = model.moe.stats().misses
        loss.backward()
        assert model.moe.stats().misses > misses
    assert told == [(what, layer) for layer in range(3) for what in ("routed", "demanded")]
    assert len(read_trace(tmp_path / "trace.npz").token_id) == TOKENS.numel()


def test_a_cache_keeps_what_a_backward_pass_needs(checkpoint):
    """Queries alone are trained: keys and values of a first step are used by a second one."""
    found = []
    for model in (load(checkpoint), AutoModelForCausalLM.from_pretrained(checkpoint)):
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name == "model.layers.0.self_attn.q_proj.weight")
        first = model(input_ids=TOKENS[:1, :8], use_cache=True)
        second = model(input_ids=TOKENS[:1, 8:], past_key_values=first.past_key_values)
        (first.logits.square().sum() + second.logits.square().sum()).backward()
        found.append(model.model.layers[0].self_attn.q_proj.weight.grad)
    assert relative(*found) < SAME
