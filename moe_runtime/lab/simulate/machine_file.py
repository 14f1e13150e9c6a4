"""Machines as files: measured links and rates that the simulator reads. TOML."""

from __future__ import annotations

import os
from typing import Any

from moe_runtime.config import nearest
from moe_runtime.files import read_toml, write_text
from moe_runtime.parallel.cluster import Cluster, Link

ASSUMED = Cluster(
    num_ranks=1,
    ranks_per_node=8,
    flops_per_s=5e14,
    launch_s=1e-5,
    copy_bytes_per_s=3e12,
    intra=Link(alpha_s=2e-6, bytes_per_s=4e11),
    inter=Link(alpha_s=5e-6, bytes_per_s=5e10),
)
"""Round numbers of eight-GPU machines with one 400 Gb/s card a GPU; assumed, not measured."""

_RATES = {
    *("ranks_per_node", "processors_per_node"),
    *("flops_per_s", "launch_s", "copy_bytes_per_s"),
}
_LINKS = ("intra", "inter")
_LINK_KEYS = {"alpha_s", "bytes_per_s", "occupies_compute"}


def read_machine(path: str | os.PathLike[str]) -> Cluster:
    """Reads a machine; its number of ranks is 1 and to be replaced.

    Raises:
        ValueError: not a TOML file, an unknown key (the message suggests the nearest), or values
            that are no rates.
        OSError: the file cannot be read.
    """
    value = read_toml(path)
    _check_numbers(value, _RATES | set(_LINKS), "machine", path)
    missing = {"ranks_per_node", "flops_per_s", *_LINKS} - set(value)
    if missing:
        raise ValueError(f"{path}: lacks {', '.join(sorted(missing))}")
    links = {}
    for name in _LINKS:
        link = _check_numbers(value[name], _LINK_KEYS, name, path)
        if not {"alpha_s", "bytes_per_s"} <= set(link):
            raise ValueError(f"{path}: [{name}] needs alpha_s and bytes_per_s")
        links[name] = Link(**link)
    rest = {key: item for key, item in value.items() if key not in links}
    return Cluster(num_ranks=1, **rest, **links)


def write_machine(cluster: Cluster, path: str | os.PathLike[str], remark: str) -> None:
    """Writes a machine that ``read_machine`` reads; the remark says where the numbers are from.

    Raises:
        OSError: the file cannot be written; an older one stays as it was.
    """
    lines = [f"# {line}" for line in remark.splitlines()]
    rates = {name: getattr(cluster, name) for name in sorted(_RATES)}
    lines += [f"{name} = {value!r}" for name, value in rates.items() if value is not None]
    for name in _LINKS:
        link: Link = getattr(cluster, name)
        lines += [
            "",
            f"[{name}]",
            f"alpha_s = {link.alpha_s!r}",
            f"bytes_per_s = {link.bytes_per_s!r}",
            f"occupies_compute = {str(link.occupies_compute).lower()}",
        ]
    write_text(path, "\n".join([*lines, ""]))


def _check_numbers(
    table: Any, known: set[str], where: str, path: str | os.PathLike[str]
) -> dict[str, Any]:
    if not isinstance(table, dict):
        raise ValueError(f"{path}: [{where}] must be a table")
    for key, item in table.items():
        if key not in known:
            raise ValueError(f"{path}: unknown key {key!r}: {nearest(key, known)}")
        is_flag = key == "occupies_compute"
        if key in _LINKS:
            continue
        if isinstance(item, bool) != is_flag or not isinstance(item, int | float):
            raise ValueError(f"{path}: {key} is {item!r}, expected a number")
    return table
