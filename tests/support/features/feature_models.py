"""Methods, saving, copying, conversions, adapters, training: rows of the table of features."""

from __future__ import annotations

import copy
import inspect
import io
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from feature_rows import Feature, outcome
from tiny_checkpoints import PROMPT
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from transformers import AutoModelForCausalLM

FACTS, PARTS = "What the model is", "Parts and settings"
INTERNAL = "What transformers calls itself"
WEIGHTS, SAVING, COPYING = "Weights", "Saving", "Copying"
COMPILING = "Compiling and exporting"
COPIED = "cannot be copied or pickled"
NOT_HERE = "are in its checkpoint's files, not in memory"
FOLLOWS = "cannot follow a loaded model"
STAYS = "give dtype and device to moe_runtime.load"


@torch.no_grad()
def logits(model: Any) -> Tensor:
    return model(PROMPT).logits


def then_logits(change: Callable[[Any], Any]) -> Any:
    """Logits of the model after a change, and what the change returned if it is plain."""

    def trial(model: Any, _: Path) -> Any:
        returned = change(model)
        is_plain = isinstance(returned, (bool, int, str, tuple, type(None)))
        return logits(model), returned if is_plain else None

    return trial


def fact(name: str, read: Callable[[Any], Any] | None = None) -> Feature:
    get = read or (lambda model: getattr(model, name))
    return Feature(
        FACTS, f"`{name}`", lambda m, _: outcome(lambda: get(m)), methods=(name,), leaves_model=True
    )


def called(group: str, name: str, *args: Any) -> Feature:
    def trial(model: Any, _: Path) -> Any:
        answered = outcome(lambda: getattr(model, name)(*args))
        return answered if answered is not model else None, logits(model)

    return Feature(group, f"`{name}`", trial, methods=(name,))


def changed(group: str, name: str, change: Callable[[Any], Any], *methods: str) -> Feature:
    return Feature(group, name, then_logits(change), methods=methods)


def refused(group: str, name: str, call: Callable[[Any], Any], line: str, *methods: str) -> Feature:
    return Feature(group, name, lambda m, _: call(m), line, methods)


def kinds(modules: Any) -> list[str]:
    return [type(module).__name__ for module in modules]


def described(state: Any) -> list[Any]:
    return [(name, tuple(tensor.shape), tensor.dtype, str(tensor.device)) for name, tensor in state]


def is_dense(name: str) -> bool:
    return ".experts." not in name


# Saving


def saved(model: Any, folder: Path, **options: Any) -> Any:
    model.save_pretrained(folder, **options)
    again = AutoModelForCausalLM.from_pretrained(folder, variant=options.get("variant"))
    return logits(again), sorted(path.name for path in folder.iterdir())


def pushed(model: Any, folder: Path) -> Any:
    found: list[Any] = []
    hub = mock.Mock()
    hub.create_repo.return_value.repo_id = "somebody/model"

    def upload(working: Any, *_: Any, **__: Any) -> None:
        found.append(logits(AutoModelForCausalLM.from_pretrained(working)))

    with (
        mock.patch("transformers.utils.hub.create_and_tag_model_card"),
        mock.patch("transformers.utils.hub.hf_api", return_value=hub, create=True),
        mock.patch("transformers.utils.hub.create_repo", hub.create_repo, create=True),
        mock.patch.object(type(model), "_upload_modified_files", side_effect=upload),
    ):
        model.push_to_hub("somebody/model")
    return found


def compiled_by_torch(model: Any, _: Path) -> Any:
    return logits(torch.compile(model, backend="eager") if is_loaded(model) else model)


def compiled_in_place(model: Any, _: Path) -> Any:
    if is_loaded(model):
        model.compile(backend="eager")
    return logits(model)


@torch.no_grad()
def prompt_and_steps(model: Any) -> list[Tensor]:
    first = model(PROMPT, use_cache=True)
    cache, found = first.past_key_values, [first.logits]
    for token in (3, 4):
        found.append(model(torch.tensor([[token]]), past_key_values=cache).logits)
    return found


def hooked(place: str) -> Callable[[Any, Path], Any]:
    """What a hook before and one after a module do to a prompt and to steps of one token."""

    def scaled(factor: float, value: Any) -> Any:
        values = value if isinstance(value, tuple) else (value,)
        changed = (values[0] * factor, *values[1:]) if values else values
        return changed if isinstance(value, tuple) else changed[0]

    def trial(model: Any, _: Path) -> Any:
        before = prompt_and_steps(model)
        part = model.get_submodule(place)
        hooks = [
            part.register_forward_pre_hook(lambda module, inputs: scaled(1.25, inputs)),
            part.register_forward_hook(lambda module, inputs, out: scaled(1.5, out)),
        ]
        found = prompt_and_steps(model)
        assert not torch.allclose(found[2], before[2], rtol=1e-2, atol=1e-2)
        for hook in hooks:
            hook.remove()
        return found, prompt_and_steps(model)

    return trial


def rescaled(model: Any, _: Path) -> Any:
    prompt_and_steps(model)
    model.model.layers[0].self_attn.scaling *= 3
    return prompt_and_steps(model)


def transformed(transform: Callable[..., Any]) -> Callable[[Any], Any]:
    """A transform of the sum of logits, as a function of embedded tokens."""

    def trial(model: Any) -> Any:
        embedded = model.get_input_embeddings()(PROMPT).detach()
        rows = embedded.expand(2, *embedded.shape) if transform is torch.func.vmap else embedded
        return transform(lambda x: model(inputs_embeds=x, use_cache=False).logits.sum())(rows)

    return trial


def faked(model: Any) -> Any:
    with FakeTensorMode(allow_non_fake_inputs=True):
        return model(PROMPT)


@torch.no_grad()
def called_with_others(model: Any, _: Path) -> Any:
    others = {"lm_head.weight": torch.ones_like(model.lm_head.weight)}
    return torch.func.functional_call(model, others, PROMPT).logits, logits(model)


def is_loaded(model: Any) -> bool:
    """A graph of a model of transformers would compute what the model does: it takes half a minute
    to find that out."""
    return hasattr(model, "moe")


def register(model: Any) -> None:
    try:
        model.register_for_auto_class("AutoModelForCausalLM")
    finally:
        type(model)._auto_class = None


def adjusted(model: Any) -> Any:
    """What `from_pretrained` calls at its end, of a folder with generation settings."""
    given = dict.fromkeys(inspect.signature(model.adjust_generation_fn).parameters)
    given |= {"pretrained_model_name_or_path": model.config._name_or_path}
    return outcome(lambda: model.adjust_generation_fn(**given)), model.generation_config.to_dict()


FEATURES = [
    *map(fact, (
        "base_model_prefix", "config_class", "device", "dtype", "dummy_inputs", "ep_plan",
        "fsdp_plan", "fsdp_size", "generation_config_class", "input_modalities",
        "is_activation_checkpointing", "is_distributed_loading_by_transformers",
        "is_gradient_checkpointing", "main_input_name", "model_tags", "output_modalities",
        "pp_plan", "supports_context_parallel", "supports_gradient_checkpointing",
        "supports_pp_plan", "supports_tp_plan", "tp_plan", "tp_size", "use_kernels",
    )),
    fact("base_model", lambda m: type(m.base_model).__name__),
    fact("can_generate", lambda m: m.can_generate()),
    fact("get_expanded_tied_weights_keys", lambda m: m.get_expanded_tied_weights_keys()),
    fact("get_experts_implementation", lambda m: list(m.get_experts_implementation())),
    fact("get_memory_footprint", lambda m: m.get_memory_footprint()),
    fact("is_backend_compatible", lambda m: m.is_backend_compatible()),
    fact("is_custom_code", lambda m: m.is_custom_code()),
    fact("is_remote_code", lambda m: m.is_remote_code()),
    fact("named_non_persistent_buffers", lambda m: described(m.named_non_persistent_buffers())),
    fact("num_parameters", lambda m: [m.num_parameters(), m.num_parameters(True),
                                      m.num_parameters(exclude_embeddings=True)]),
    fact("get_correct_attn_implementation", lambda m: m.get_correct_attn_implementation("eager")),
    fact("get_correct_experts_implementation",
         lambda m: m.get_correct_experts_implementation("eager")),
    called(PARTS, "add_model_tags", ["mine"]),
    changed(PARTS, "embeddings, read and set",
            lambda m: (m.set_input_embeddings(m.get_input_embeddings()),
                       m.set_output_embeddings(m.get_output_embeddings())),
            "get_input_embeddings", "set_input_embeddings", "get_output_embeddings",
            "set_output_embeddings"),
    changed(PARTS, "`resize_token_embeddings`",
            lambda m: m.resize_token_embeddings(80).num_embeddings, "resize_token_embeddings"),
    called(PARTS, "get_position_embeddings"),
    called(PARTS, "resize_position_embeddings", 64),
    Feature(PARTS, "`get_decoder`, `get_encoder`",
            lambda m, _: kinds((m.get_decoder(), m.get_encoder())),
            methods=("get_decoder", "get_encoder"), leaves_model=True),
    changed(PARTS, "`set_decoder`", lambda m: m.set_decoder(m.get_decoder()), "set_decoder"),
    changed(PARTS, "`set_encoder`",
            lambda m: outcome(lambda: m.set_encoder(m.get_encoder())), "set_encoder"),
    changed(PARTS, "`tie_weights`", lambda m: m.tie_weights(), "tie_weights"),
    changed(PARTS, "`init_weights`: changes nothing that is loaded", lambda m: m.init_weights(),
            "init_weights", "initialize_weights"),
    changed(PARTS, "`set_experts_implementation`",
            lambda m: m.set_experts_implementation("eager"), "set_experts_implementation"),
    changed(PARTS, "`set_use_kernels`", lambda m: outcome(lambda: m.set_use_kernels(False)),
            "set_use_kernels"),
    changed(PARTS, "`dequantize`: there is nothing to",
            lambda m: outcome(lambda: m.dequantize()), "dequantize"),
    Feature(PARTS, "`heal_tokens`: needs a tokenizer",
            lambda m, _: outcome(lambda: m.heal_tokens(PROMPT, None)),
            methods=("heal_tokens",), leaves_model=True),
    Feature(PARTS, "`prepare_inputs_for_generation`",
            lambda m, _: {name: value for name, value in m.prepare_inputs_for_generation(
                PROMPT, attention_mask=torch.ones_like(PROMPT), is_first_iteration=True).items()
                if isinstance(value, Tensor)},
            methods=("prepare_inputs_for_generation",), leaves_model=True),
    *(Feature(PARTS, f"hooks {name}", hooked(place)) for name, place in (
        ("on a layer", "model.layers.1"), ("on attention", "model.layers.1.self_attn"),
        ("on a part of attention", "model.layers.1.self_attn.k_proj"),
        ("on a norm", "model.layers.1.input_layernorm"), ("on a router", "model.layers.1.mlp.gate"),
        ("on experts", "model.layers.1.mlp.experts"),
        ("on the experts' activation", "model.layers.1.mlp.experts.act_fn"),
        ("on `lm_head`", "lm_head"),
    )),
    Feature(PARTS, "a layer's number changed: the scale of its attention", rescaled),
    Feature(WEIGHTS, "`state_dict`, `parameters`: names, shapes, dtypes, devices",
            lambda m, _: [described(m.state_dict().items()), described(m.named_parameters())],
            leaves_model=True),
    Feature(WEIGHTS, "values outside the experts",
            lambda m, _: {n: p.detach() for n, p in m.named_parameters() if is_dense(n)},
            leaves_model=True),
    Feature(WEIGHTS, "`get_parameter_or_buffer`",
            lambda m, _: m.get_parameter_or_buffer("lm_head.weight").detach(),
            methods=("get_parameter_or_buffer",), leaves_model=True),
    refused(WEIGHTS, "values of experts",
            lambda m: m.state_dict()["model.layers.0.mlp.experts.down_proj"] + 1, NOT_HERE),
    changed(WEIGHTS, "`load_state_dict` of values outside the experts",
            lambda m: m.load_state_dict({"lm_head.weight": torch.ones_like(m.lm_head.weight)},
                                        strict=False) and None),
    refused(WEIGHTS, "`load_state_dict` of experts",
            lambda m: m.load_state_dict({n: torch.zeros(p.shape) for n, p in
                                         m.named_parameters()}), "cannot be given"),
    changed(WEIGHTS, "`to`, `cpu`, `float` to the dtype and device that it has",
            lambda m: m.to("cpu", torch.float32).cpu().float() and None),
    *(refused(WEIGHTS, f"`{name}`: another dtype or device", call, STAYS) for name, call in {
        "half": lambda m: m.half(), "bfloat16": lambda m: m.bfloat16(),
        "double": lambda m: m.double(), "to(torch.float16)": lambda m: m.to(torch.float16),
        "to(\"meta\")": lambda m: m.to("meta"), "type": lambda m: m.type(torch.float16),
    }.items()),
    changed(WEIGHTS, "`share_memory`", lambda m: m.share_memory() and None),
    Feature(SAVING, "`save_pretrained`", saved, methods=("save_pretrained",)),
    Feature(SAVING, "`save_pretrained`: `max_shard_size`, `variant`",
            lambda m, f: saved(m, f, max_shard_size="1GB", variant="best")),
    Feature(SAVING, "`save_pretrained`: `state_dict`",
            lambda m, f: saved(m, f, state_dict=m.state_dict())),
    Feature(SAVING, "`push_to_hub`", pushed, methods=("push_to_hub",)),
    *(Feature(SAVING, f"`save_pretrained({name})`", trial, line) for name, trial, line in (
        ("push_to_hub=True", lambda m, f: m.save_pretrained(f, push_to_hub=True),
         "save first, then call model.push_to_hub"),
        ("save_original_format=False",
         lambda m, f: m.save_pretrained(f, save_original_format=False),
         "names and layout are those of the checkpoint"),
    )),
    Feature(SAVING, "`save_distributed_checkpoint`",
            lambda m, f: m.save_distributed_checkpoint(m, f), "one process writes the whole",
            ("save_distributed_checkpoint",)),
    refused(SAVING, "`torch.save(model.state_dict())`",
            lambda m: torch.save(m.state_dict(), io.BytesIO()), NOT_HERE),
    refused(COPYING, "`copy.deepcopy`", copy.deepcopy, COPIED),
    refused(COPYING, "`copy.deepcopy` of a part with experts",
            lambda m: copy.deepcopy(m.model.layers[0]), COPIED),
    refused(COPYING, "`pickle.dumps`", pickle.dumps, COPIED),
    refused(COPYING, "`torch.save(model)`", lambda m: torch.save(m, io.BytesIO()), COPIED),
    Feature(COMPILING, "`model.compile`: experts between graphs", compiled_in_place, is_long=True),
    Feature(COMPILING, "`torch.compile`: experts between graphs", compiled_by_torch, is_long=True),
    refused(COMPILING, "`torch.export`",
            lambda m: torch.export.export(m, (PROMPT,), {"use_cache": False}, strict=False),
            NOT_HERE),
    *(refused(COMPILING, f"`{name}`", transform, FOLLOWS) for name, transform in {
        "torch.jit.trace": lambda m: torch.jit.trace(m, PROMPT, strict=False),
        "torch.jit.script": torch.jit.script,
        "torch.onnx.export(dynamo=False)": lambda m: torch.onnx.export(
            m, (PROMPT,), os.devnull, dynamo=False),
        "make_fx": lambda m: make_fx(lambda ids: m(ids).logits)(PROMPT),
        "FakeTensorMode": faked,
    }.items()),
    *(refused(COMPILING, f"`torch.func.{name}`", transformed(transform), line)
      for name, transform, line in (
          ("vmap", torch.func.vmap, "call it on a batch"),
          ("grad", torch.func.grad, "use backward()"),
          ("vjp", lambda f: lambda x: torch.func.vjp(f, x), "use backward()"),
          ("jvp", lambda f: lambda x: torch.func.jvp(f, (x,), (x,)), "use backward()"),
          ("jacrev", torch.func.jacrev, "use backward()"),
          ("jacfwd", torch.func.jacfwd, "torch.func cannot transform"),
          ("hessian", torch.func.hessian, "torch.func cannot transform"),
          ("functionalize", torch.func.functionalize, "outside of the transform"),
          ("linearize", lambda f: lambda x: torch.func.linearize(f, x), FOLLOWS),
      )),
    Feature(COMPILING, "`torch.func.functional_call` outside the experts", called_with_others),
    Feature(COMPILING, "`torch.fx.symbolic_trace` (of no model of transformers)",
            lambda m, _: outcome(lambda: torch.fx.symbolic_trace(m))),
    changed(INTERNAL, "`post_init`", lambda m: m.post_init(), "post_init"),
    Feature(INTERNAL, "`adjust_generation_fn`",
            lambda m, _: adjusted(m),
            methods=("adjust_generation_fn",)),
    called(INTERNAL, "barrier_after_gathered_checkpoint_save", None),
    Feature(INTERNAL, "`from_pretrained` of its class: a model in memory",
            lambda m, _: logits(type(m).from_pretrained(m.config._name_or_path).eval()),
            methods=("from_pretrained",), leaves_model=True),
    Feature(INTERNAL, "`gather_sharded_state_dict_for_save`",
            lambda m, _: list(m.gather_sharded_state_dict_for_save(
                m, m.state_dict(), None, save_on_this_rank=True)),
            methods=("gather_sharded_state_dict_for_save",)),
    Feature(INTERNAL, "`get_init_context`",
            lambda m, _: kinds(m.get_init_context(torch.float32, False, False, None)),
            methods=("get_init_context",)),
    changed(INTERNAL, "`init_parallel_plans`", lambda m: m.init_parallel_plans(),
            "init_parallel_plans"),
    Feature(INTERNAL, "`mark_tied_weights_as_initialized`",
            lambda m, _: outcome(lambda: m.mark_tied_weights_as_initialized(mock.Mock(
                missing_keys=set()))), methods=("mark_tied_weights_as_initialized",)),
    Feature(INTERNAL, "`maybe_distribute_model`, `prepare_distribute_model`",
            lambda m, _: [kinds([m.maybe_distribute_model(m, None, None)]),
                          m.prepare_distribute_model(None)],
            methods=("maybe_distribute_model", "prepare_distribute_model")),
    Feature(INTERNAL, "`register_for_auto_class`", lambda m, _: register(m),
            methods=("register_for_auto_class",)),
    Feature(INTERNAL, "`retrieve_modules_from_names`",
            lambda m, _: kinds(m.retrieve_modules_from_names(["lm_head"])),
            methods=("retrieve_modules_from_names",), leaves_model=True),
    called(INTERNAL, "should_save_on_this_rank", True),
]  # fmt: skip
