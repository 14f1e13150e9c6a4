"""The formats of compressed-tensors, chosen by module in the `config_groups`.

https://github.com/vllm-project/compressed-tensors
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from moe_runtime.checkpoints.formats.packed_weight import (
    Contents,
    PackedWeight,
    Settings,
    codes_shape,
    matches,
    one_number,
    part_of,
    require_beside,
    with_scales,
)
from moe_runtime.checkpoints.safetensors_index import TensorEntry
from moe_runtime.errors import CheckpointError, UnsupportedModelError
from moe_runtime.kernels.quantized import CodeName, ScaleName, WeightFormat

_FLOATS = ("BF16", "F32", "F16")
_E8M0 = ("U8", "F8_E8M0")
_MIXED = ("mixed-precision", "dense")
"""Names of the whole format where each group has its own."""
_WORD_BITS = 32
_PACKED, _SCALES = ".weight_packed", ".weight_scale"


@dataclass(frozen=True, slots=True)
class _Module:
    name: str
    how: Settings  # its part of the configuration
    entries: Mapping[str, TensorEntry]
    contents: Contents  # reads a `weight_shape`
    kind: str

    @property
    def weight(self) -> str:
        return f"{self.name}.weight"

    def part(self, suffix: str) -> TensorEntry:
        what = f"a part of {self.weight}, {self.kind} by the config_groups of config.json,"
        return part_of(self.entries, self.name, [f".weight{suffix}"], what)

    def groups(self) -> tuple[int, int]:
        strategy = self.how.choice(
            "strategy", ("group", "tensor_group", "channel", "tensor", "block")
        )
        if strategy == "block":
            return self.how.block("block_structure") or self.how.refuse("block_structure", "there")
        if strategy in ("channel", "tensor"):
            return (1 if strategy == "channel" else 0), 0
        return 1, self.how.size("group_size") or self.how.refuse("group_size", "there")


def weights_of(settings: Settings, entries: Mapping[str, TensorEntry]) -> Iterator[PackedWeight]:
    if settings.get("sparsity_config"):
        settings.unsupported("a sparsity_config", "dense weights")
    targets = _targets_of(settings)
    ignored = settings.names("ignore")
    with Contents() as contents:
        for name in entries:
            module = name.removesuffix(_SCALES)
            if name.endswith(_PACKED):
                part_of(entries, name.removesuffix(_PACKED), [_SCALES], f"the scales of {name}")
            if module == name:
                _require_scales(name, entries, ignored)
                continue
            if matches(module, ignored):
                raise CheckpointError(
                    f"{name}: expected no scales of a module that the quantization_config of "
                    "config.json ignores"
                )
            how, kind = _how(module, name, targets)
            if kind not in FORMATS:
                settings.unsupported(f"format {kind!r} of {name}", " or ".join(FORMATS))
            yield FORMATS[kind](_Module(module, how, entries, contents, kind))


def _require_scales(name: str, entries: Mapping[str, TensorEntry], ignored: list[str]) -> None:
    module = name.removesuffix(".weight")
    is_alone = module != name and f"{module}{_SCALES}" not in entries
    if is_alone and entries[name].dtype in ("I8", "F8_E4M3") and not matches(module, ignored):
        part_of(entries, module, [_SCALES], f"the scales of {name}")


def _targets_of(settings: Settings) -> dict[str, tuple[Settings, str]]:
    groups = settings.part("config_groups")
    found = {}
    for name in groups.values:
        group = groups.part(name)
        if group.get("weights") is not None:
            kind = group.text("format") or settings.text("format") or "missing"
            found |= dict.fromkeys(group.names("targets"), (group.part("weights"), kind))
    whole, kinds = settings.text("format"), {kind for _, kind in found.values()}
    if kinds and whole not in {None, *_MIXED, *kinds}:
        settings.refuse("format", f"{' or '.join(sorted(kinds))}, as config_groups have")
    return {target: found[target] for target in sorted(found, key=lambda t: ("re:" in t, t))}


def _how(
    module: str, name: str, targets: Mapping[str, tuple[Settings, str]]
) -> tuple[Settings, str]:
    """A module's settings and format: of the first target that names it, else of its class."""
    for target, how in targets.items():
        if matches(module, [target]):
            return how
    if "Linear" in targets:
        return targets["Linear"]
    raise CheckpointError(
        f"{name}: expected its module among the targets of config_groups in the "
        "quantization_config of config.json, found it in none of them"
    )


def _packed_integers(module: _Module) -> PackedWeight:
    """Unsigned codes of 4 or 8 bits in words: `q + 2 ** (bits - 1)`, or with zero points."""
    module.how.choice("type", ("int",))
    bits = module.how.choice("num_bits", (4, 8))
    zeros = _zero_points(module)
    kind = WeightFormat("uint4" if bits == 4 else "uint8", "f32", *module.groups(), 1 << (bits - 1))
    codes, shape = module.part("_packed"), module.part("_shape")
    rows, width = codes_shape(codes, ["I32"], [2])
    stored_rows, cols = map(int, module.contents.numbers(shape, 2))
    scales, words = module.part("_scale"), -(-cols * bits // _WORD_BITS)
    if stored_rows != rows or cols < 1 or words != width:
        raise CheckpointError(
            f"{shape.name}: expected the sizes of {codes.name} {list(codes.shape)} with {bits} "
            f"bits a code, found {[stored_rows, cols]}"
        )
    weight = with_scales(module.weight, codes, (rows, cols), scales, _FLOATS, kind)
    if zeros is None:
        return weight
    groups = weight.format.scales_shape(rows, cols)[1]
    require_beside(zeros, codes, (-(-rows * bits // _WORD_BITS), groups), ["I32"])
    return _with_zero_points(weight, zeros, None, "zeros_down")


def _integers(module: _Module) -> PackedWeight:
    """Signed bytes; with zero points, which are signed too, both are read unsigned."""
    module.how.choice("type", ("int",))
    module.how.choice("num_bits", (8,))
    zeros = _zero_points(module)
    codes, kind = module.part(""), WeightFormat("int8", "f32", *module.groups())
    sizes = codes_shape(codes, ["I8"], [2])
    weight = with_scales(module.weight, codes, sizes, module.part("_scale"), _FLOATS, kind)
    if zeros is None:
        return weight
    sizes = weight.format.scales_shape(weight.num_rows, weight.num_cols)
    require_beside(zeros, weight.codes, sizes, ["I8"])
    return _with_zero_points(weight, zeros, "int8", "int8")


def _with_zero_points(
    weight: PackedWeight, zeros: TensorEntry, codes: str | None, order: str
) -> PackedWeight:
    kind = replace(
        weight.format,
        codes="uint4" if weight.format.bits == 4 else "uint8",
        zero=0,
        has_zero_points=True,
    )
    return PackedWeight(
        *(weight.name, (), weight.num_rows, weight.num_cols, kind, weight.codes, weight.scales),
        zero_points=zeros,
        orders={"codes": codes, "scales": None, "zero_points": order},
    )


class _Floats(NamedTuple):
    suffix: str
    dtype: str
    codes: CodeName
    # meaning and safetensors types of scales, and the rows and columns that share one
    scales: tuple[ScaleName, tuple[str, ...], tuple[int, int] | None]
    has_global_scale: bool = False  # it divides; ModelOpt's multiplies


_FLOAT_FORMATS = {
    "float-quantized": _Floats("", "F8_E4M3", "e4m3", ("f32", _FLOATS, None)),
    "mxfp8-quantized": _Floats("", "F8_E4M3", "e4m3", ("e8m0", _E8M0, (1, 32))),
    "mxfp4-pack-quantized": _Floats("_packed", "U8", "e2m1", ("e8m0", _E8M0, (1, 32))),
    "nvfp4-pack-quantized": _Floats("_packed", "U8", "e2m1", ("e4m3", ("F8_E4M3",), None), True),
}


def _floats(module: _Module) -> PackedWeight:
    """Floats of 8 or 4 bits, always symmetric."""
    form = _FLOAT_FORMATS.get(module.kind, _FLOAT_FORMATS["float-quantized"])
    if (zeros := _zero_points(module)) is not None:
        raise UnsupportedModelError(
            f"{zeros.name}: zero points of floats cannot be read yet; expected symmetric ones"
        )
    if form is _FLOAT_FORMATS["float-quantized"]:
        module.how.choice("type", ("float",))
        module.how.choice("num_bits", (8,))
    codes = module.part(form.suffix)
    rows, width = codes_shape(codes, [form.dtype], [2])
    scales, dtypes, groups = form.scales
    factor = one_number(module.part("_global_scale")) if form.has_global_scale else None
    kind = WeightFormat(
        *(form.codes, scales, *(groups or module.groups())),
        global_scale="divide" if form.has_global_scale else "none",
    )
    sizes = (rows, width * 8 // kind.bits)
    scales = module.part("_scale")
    return with_scales(module.weight, codes, sizes, scales, dtypes, kind, global_scale=factor)


def _integers_or_floats(module: _Module) -> PackedWeight:
    return (_integers if module.how.get("type") == "int" else _floats)(module)


FORMATS: Mapping[str, Callable[[_Module], PackedWeight]] = {
    "pack-quantized": _packed_integers,
    "int-quantized": _integers,
    "naive-quantized": _integers_or_floats,
    **dict.fromkeys(_FLOAT_FORMATS, _floats),
}
"""The reader of each format in `config_groups`."""


def _zero_points(module: _Module) -> TensorEntry | None:
    """The zero points of codes, for rows or groups; None if the codes are symmetric."""
    groups, zeros = f"{module.weight}_g_idx", f"{module.weight}_zero_point"
    if groups in module.entries:
        raise UnsupportedModelError(
            f"{groups}: permuted groups (actorder) cannot be read yet; expected groups in the "
            "order of the columns"
        )
    if module.how.get("actorder") in ("group", "dynamic", True):
        module.how.unsupported("actorder of groups", "groups in the order of the columns")
    if module.how.choice("symmetric", (True, False, None)) is not False:
        if zeros in module.entries:
            raise CheckpointError(
                f"{zeros}: expected no zero points of codes that the quantization_config of "
                "config.json calls symmetric"
            )
        return None
    if module.groups()[0] != 1:
        module.how.unsupported(
            f"strategy {module.how.get('strategy')!r} with zero points", "group or channel"
        )
    return module.part("_zero_point")
