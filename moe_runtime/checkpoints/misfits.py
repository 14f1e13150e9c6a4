"""Names the tensor that is to blame where those of experts are not what a model has."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NoReturn

from moe_runtime.checkpoints.formats import sign_of
from moe_runtime.checkpoints.safetensors_index import TensorEntry
from moe_runtime.errors import CheckpointError, UnsupportedModelError

if TYPE_CHECKING:
    from torch import Tensor

    from moe_runtime.checkpoints.expert_places import PlacedMatrix
    from moe_runtime.checkpoints.formats import Weight

_NUMBERED = re.compile(r"(.*\.)(\d+)(\..*)")
_Stem = tuple[str, str]  # A weight's name, before and behind the number of the expert
_AGAIN = "fetch the checkpoint again, or correct the configuration"


def first_number(lowest: int, num_experts: int) -> int:
    """The number of a layer's first expert: some families count on from other experts."""
    return 0 if lowest < num_experts else lowest


def refuse_sources(
    name: str,
    sources: Iterable[str],
    weights: Iterable[Weight],
    entries: Mapping[str, TensorEntry],
    shape: Sequence[int],
    found: Tensor | str | None,
) -> NoReturn:
    """Refuses what a parameter of all experts of a layer would be made of."""
    named = {weight.name: weight for weight in weights}
    sources, num_experts = sorted(sources), shape[0]
    for source in sources:
        _require_index(named[source], entries, shape[1:])
    # what no format took is among the plain weights
    untaken = [entry for entry in entries if entry in named]
    if not sources:
        match = _NUMBERED.fullmatch(name)
        layer = f"{match[1]}{match[2]}." if match else name
        near = [entry for entry in untaken if entry.startswith(layer) and "expert" in entry]
        raise CheckpointError(f"the checkpoint has no tensors for {name}; {_remedy(near)}")
    by_stem: dict[_Stem, dict[int, Weight]] = defaultdict(dict)
    for source in sources:
        if match := _NUMBERED.fullmatch(source):
            by_stem[match[1], match[3]][int(match[2])] = named[source]
    if any(len(experts) > 1 for experts in by_stem.values()):
        for stem in _stems_of_other_layers(by_stem, named):
            _require_experts(stem, {}, num_experts, untaken)
        for stem, experts in by_stem.items():
            _require_experts(stem, experts, num_experts, untaken)
        for experts in by_stem.values():
            _require_one_shape(experts)
    gives = found if isinstance(found, str) else tuple(getattr(found, "shape", ()))
    shapes = ", ".join(f"{source} {_shape_of(named[source])}" for source in sources[:2])
    raise CheckpointError(
        f"{name}: expected {tuple(shape)}, as the configuration says, the checkpoint gives "
        f"{gives}: {shapes}{' and others' if len(sources) > 2 else ''}; {_AGAIN}"
    )


def refuse_dense(
    name: str,
    expected: Sequence[int],
    found: Sequence[int],
    weights: Mapping[str, Weight],
    entries: Mapping[str, TensorEntry],
) -> NoReturn:
    """Refuses a weight that is no expert's and of another shape than the model's."""
    weight, shape = weights.get(name), f"{[*found]}"
    if weight is not None:
        _require_index(weight, entries, expected)
        shape = _shape_of(weight)
    raise CheckpointError(f"{name}: expected {[*expected]}, the checkpoint has {shape}; {_AGAIN}")


def refuse_types(name: str, matrix: str, of_experts: Sequence[PlacedMatrix]) -> NoReturn:
    """Refuses experts whose matrices one product could not take together."""
    kinds = [(placed.described, placed.packing) for placed in of_experts]
    usual = Counter(kinds).most_common(1)[0][0]
    expert = next(number for number, kind in enumerate(kinds) if kind != usual)
    # described alike, they differ in what only their packings say
    is_told = kinds[expert][0] != usual[0]
    one, others = (kind[0] if is_told else str(kind[1]) for kind in (kinds[expert], usual))
    raise UnsupportedModelError(
        f"{name}: expected one type for all experts of a layer, found the {matrix} weights of "
        f"expert {expert}, {of_experts[expert].name}, in {one}, those of others in {others}: save "
        "the checkpoint again in one type"
    )


def refuse_numbers(
    matrix: str,
    numbers: Sequence[int],
    start: int,
    of_experts: Sequence[PlacedMatrix],
) -> NoReturn:
    """Refuses experts that are as many as they must be, but are not those."""
    place = next(place for place, number in enumerate(numbers) if number != start + place)
    raise CheckpointError(
        f"{of_experts[place].name}: expected the {matrix} weights of experts {start} to "
        f"{start + len(numbers) - 1} of the layer, found none of expert {start + place}, but "
        f"these; {_AGAIN}"
    )


def _remedy(near: list[str]) -> str:
    """What to do, by the tensors that are there in the place of a weight."""
    sign = sign_of(near)
    if not sign:
        return _AGAIN
    remedy = "correct the quantization_config of config.json, or fetch the checkpoint again"
    return f"found {sign}: {remedy}"


def _stems_of_other_layers(stems: Iterable[_Stem], named: Iterable[str]) -> Iterator[_Stem]:
    """Those that other layers have beside these, and this has not."""
    for head in sorted({head for head, _ in stems}):
        numbered = re.compile(
            re.sub(r"\d+", r"\\d+", re.escape(head)) + r"\d+(\..*(?:weight|bias))"
        )
        matches = [match for name in named if (match := numbered.fullmatch(name))]
        own = {match[1] for match in matches if match[0].startswith(head)}
        yield from ((head, tail) for tail in sorted({match[1] for match in matches} - own))


def _require_experts(
    stem: _Stem, found: Mapping[int, Weight], num_experts: int, entries: list[str]
) -> None:
    first = first_number(min(found, default=0), num_experts)
    last = first + num_experts - 1
    expected = f"experts {first} to {last}, as the configuration says"
    for expert in sorted({*range(first, last + 1), *found}):
        name = f"{stem[0]}{expert}{stem[1]}"
        if expert > last:
            raise CheckpointError(
                f"{name}: expected {expected}, found one of expert {expert}; correct the number "
                "of experts in the configuration"
            )
        if expert not in found:
            own = name.removesuffix("weight")
            hint = _remedy([entry for entry in entries if entry.startswith(own)])
            raise CheckpointError(
                f"{name}: expected it for {expected}, found none of expert {expert} among those of "
                f"{len(found)}; {hint}"
            )


def _require_one_shape(found: Mapping[int, Weight]) -> None:
    usual = Counter(tuple(weight.shape) for weight in found.values()).most_common(1)[0][0]
    for weight in found.values():
        if tuple(weight.shape) != usual:
            raise CheckpointError(
                f"{weight.name}: expected {[*usual]} as those of other experts, found "
                f"{_shape_of(weight)}; fetch the checkpoint again"
            )


def _shape_of(weight: Weight) -> str:
    """The shape of a weight, and of the codes that it is made of."""
    codes = getattr(weight, "codes", None)
    return f"{[*weight.shape]}" + (f" in {codes.name} {[*codes.shape]}" if codes else "")


def _require_index(
    weight: Weight, entries: Mapping[str, TensorEntry], sizes: Sequence[int]
) -> None:
    """Checks the `g_idx` of GPTQ, which says how many columns the last words of codes have."""
    index = entries.get(f"{weight.name.removesuffix('weight')}g_idx")
    if index is None or isinstance(weight, TensorEntry) or weight.num_cols in sizes:
        return
    num_words, per_word = weight.codes.shape[0], 32 // weight.format.bits
    for size in sizes:
        if -(-size // per_word) == num_words:
            raise CheckpointError(
                f"{index.name}: expected [{size}], a group for each column of "
                f"{weight.codes.name} {[*weight.codes.shape]}, as the configuration says, found "
                f"{[*index.shape]}; {_AGAIN}"
            )
