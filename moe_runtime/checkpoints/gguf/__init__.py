"""GGUF files as checkpoints; experts are read from the file as stored.

Tensors get the names of a checkpoint of `transformers`; a stack of experts is one tensor an expert.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moe_runtime.checkpoints.checkpoint import Checkpoint
from moe_runtime.checkpoints.formats import PackedWeight
from moe_runtime.checkpoints.gguf.architectures import (
    ValueChange,
    architecture_of,
    named_weights,
    settings_of,
)
from moe_runtime.checkpoints.gguf.header import GgufHeader, GgufTensor, read_header
from moe_runtime.checkpoints.gguf.tokenizer import make_tokenizer, read_vocabulary
from moe_runtime.checkpoints.safetensors_index import TORCH_DTYPES, TensorEntry
from moe_runtime.checkpoints.strict_json import (
    check_config,
    check_generation_settings,
    check_layers,
    clipped,
    one_line,
)
from moe_runtime.errors import CheckpointError, UnsupportedModelError, blamed_on
from moe_runtime.kernels.quantized import BlockName, WeightFormat

if TYPE_CHECKING:
    from transformers import GenerationConfig

_PLAIN = {0: "F32", 1: "F16", 30: "BF16"}
_BLOCKS: dict[int, BlockName] = {
    **{2: "q4_0", 3: "q4_1", 6: "q5_0", 7: "q5_1", 8: "q8_0", 10: "q2_k", 11: "q3_k", 12: "q4_k"},
    **{13: "q5_k", 14: "q6_k", 20: "iq4_nl", 23: "iq4_xs", 39: "mxfp4_block"},
}
"""Type numbers of ggml."""
_UNREAD = {
    **{16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 21: "IQ3_S", 22: "IQ2_S"},
    **{28: "F64", 29: "IQ1_M", 34: "TQ1_0", 35: "TQ2_0", 40: "NVFP4", 41: "Q1_0", 42: "Q2_0"},
}
"""Types that are not supported."""
_PLAIN_BLOCKS: dict[int, BlockName] = {0: "f32_block", 1: "f16_block"}
"""Plain types other than bf16, for experts in a layer of mixed types."""
_EXPERTS = re.compile(r"blk\.(\d+)\.ffn_\w+_exps\.")
_LAYER_OR_END = re.compile(r"^model\.layers\.\d+\.|\.weight$")  # the text around the name of a part
_ONE_ROW = "moe_statics.e_score_correction_bias"
_SAMPLING = {
    "temperature": "temp",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "penalty_repeat",
}
"""Keys of `general.sampling` by setting of transformers."""
_SPLIT = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")


def read_model(file: Path) -> Checkpoint:
    """Reads the headers of a model, which computes in the dtype of most weights."""
    header = _read_parts(file)
    architecture = architecture_of(header)
    values = settings_of(header, architecture)
    model_type = architecture.model_type
    check_config({"model_type": model_type, **values}, file)
    entries: dict[str, TensorEntry] = {}
    packed: dict[str, PackedWeight] = {}
    origins: dict[str, str] = {}
    elements: Counter[str] = Counter()
    stacks: dict[str, list[GgufTensor]] = defaultdict(list)
    for tensor in header.tensors:
        if found := _EXPERTS.match(tensor.name):
            stacks[found[1]].append(tensor)
    mixed = {  # experts' matrices in layers of mixed types
        tensor.name
        for of_layer in stacks.values()
        if len({tensor.type_id for tensor in of_layer}) > 1
        for tensor in of_layer
        if tensor.name.endswith(".weight")
    }
    for name, tensor, expert in named_weights(header, architecture):
        if name in entries:
            header.refuse(f"{name} once", f"it twice: in {tensor.name} too")
        origins[name] = tensor.name
        kinds = _BLOCKS | _PLAIN_BLOCKS if tensor.name in mixed else _BLOCKS
        if tensor.type_id in _PLAIN and tensor.type_id not in kinds:
            entries[name] = _entry(name, tensor, expert, _PLAIN[tensor.type_id], tensor.shape)
        else:
            packed[name] = _packed(name, tensor, expert, kinds, file)
            entries[name] = packed[name].codes
        if (change := architecture.changes.get(_LAYER_OR_END.sub("", name))) is not None:
            _change(name, change, entries, packed)
        elements[_PLAIN.get(tensor.type_id, "BF16")] += entries[name].num_bytes
    from transformers import AutoConfig

    with blamed_on(f"{one_line(str(file))}: its metadata do not describe a {model_type}"):
        config: Any = AutoConfig.for_model(model_type, **values)
    config.architectures = [architecture.model_class]
    most = elements.most_common(1)[0][0]
    config.dtype = dtype = TORCH_DTYPES[most]
    check_layers(config, entries, file)
    return Checkpoint(
        *(file, config, entries, dtype, packed, None, architecture.conversions()),
        adapt=architecture.adapt,
        origins=origins,
    )


def _change(
    name: str, change: ValueChange, entries: dict[str, TensorEntry], packed: dict[str, PackedWeight]
) -> None:
    if name in packed and change.shape is not tuple:
        raise UnsupportedModelError(
            f"{one_line(str(packed[name].codes.file))}: {name} is quantised; expected F32, F16 or "
            "BF16"
        )
    if name in packed:
        block, columns = packed[name].format.block_codes, change.moved_columns
        moves_codes = change.moves_rows or (columns > 0 and columns % block == 0)
        packed[name] = replace(packed[name], convert=change.convert, moves_codes=moves_codes)
    else:
        entry = entries[name]
        entries[name] = replace(entry, shape=change.shape(entry.shape), convert=change.convert)


def load_tokenizer(file: Path) -> Any:
    return make_tokenizer(*_vocabulary_of(file), file)


def generation_settings(file: Path) -> GenerationConfig | None:
    """The generation settings of a file's model; None without a vocabulary."""
    from transformers import GenerationConfig

    metadata, num_rows = _vocabulary_of(file)
    if "tokenizer.ggml.tokens" not in metadata:
        return None
    vocabulary = read_vocabulary(metadata, num_rows, file)
    sampling = {
        name: metadata[f"general.sampling.{key}"]
        for name, key in _SAMPLING.items()
        if f"general.sampling.{key}" in metadata
    }
    check_generation_settings(sampling, file)
    named = vocabulary.named
    first = named.get("eos")
    return GenerationConfig(
        bos_token_id=named.get("bos"),
        eos_token_id=sorted(vocabulary.ends, key=lambda end: (end != first, end)) or None,
        pad_token_id=named.get("padding"),
        do_sample=bool(sampling.get("temperature")),
        **sampling,
    )


def _vocabulary_of(file: Path) -> tuple[dict[str, Any], int]:
    header = _read_parts(file, with_texts=True)
    tables = (each.shape[0] for each in header.tensors if each.name == "token_embd.weight")
    return header.metadata, next(tables, 0)


def _read_parts(file: Path, *, with_texts: bool = False) -> GgufHeader:
    """The header of a file; of a split file with the tensors of all parts."""
    header = read_header(file, with_texts=with_texts)
    count = header.metadata.get("split.count", 1)
    if type(count) is not int or count < 2:
        return header
    found = _SPLIT.fullmatch(file.name)
    if found is None or int(found[2]) != 1 or int(found[3]) != count:
        expected = f"the first of {count} files, NAME-00001-of-{count:05}.gguf"
        raise CheckpointError(f"{one_line(str(file))}: expected {expected}")
    tensors = {tensor.name: tensor for tensor in header.tensors}
    for number in range(2, count + 1):
        part = file.with_name(f"{found[1]}-{number:05}-of-{count:05}.gguf")
        for tensor in read_header(part).tensors:
            if tensor.name in tensors:
                where = f"it here and in {tensors[tensor.name].file}"
                raise CheckpointError(
                    f"{part}: expected {clipped(tensor.name)} once, found {where}"
                )
            tensors[tensor.name] = tensor
    return replace(header, tensors=[*tensors.values()])


def _entry(
    name: str, tensor: GgufTensor, expert: int, dtype: str, shape: tuple[int, ...]
) -> TensorEntry:
    if expert < 0:
        # gates with one output, and ERNIE's corrections, are vectors in files
        if len(shape) == 1 and name.endswith(("_gate.weight", _ONE_ROW)):
            shape = (1, *shape)
        return TensorEntry(name, tensor.file, dtype, shape, tensor.offset, tensor.num_bytes)
    num_bytes = tensor.num_bytes // tensor.shape[0]
    offset = tensor.offset + expert * num_bytes
    return TensorEntry(name, tensor.file, dtype, shape[1:], offset, num_bytes)


def _packed(
    name: str, tensor: GgufTensor, expert: int, kinds: Mapping[int, BlockName], file: Path
) -> PackedWeight:
    if tensor.type_id not in kinds:
        name = _UNREAD.get(tensor.type_id, "an integer")
        raise UnsupportedModelError(
            f"{one_line(str(file))}: {clipped(tensor.name)} has ggml's type {tensor.type_id} "
            f"({name}); "
            f"expected F32, F16, BF16 or {', '.join(kind.upper() for kind in _BLOCKS.values())}"
        )
    is_stack = expert >= 0 or tensor.name.endswith(("attn_k_b.weight", "attn_v_b.weight"))
    if len(tensor.shape) != (3 if is_stack else 2):
        raise CheckpointError(
            f"{one_line(str(file))}: expected {clipped(tensor.name)}, which is quantised, to be a "
            f"matrix or one for each expert or head, found {[*tensor.shape]}"
        )
    kind = WeightFormat(kinds[tensor.type_id])
    *lead, num_rows, num_cols = tensor.shape
    codes = _entry(name, tensor, expert, "U8", (*lead, num_rows, kind.row_bytes(num_cols)))
    sizes = () if expert >= 0 else tuple(lead)
    return PackedWeight(name, sizes, num_rows, num_cols, kind, codes)
