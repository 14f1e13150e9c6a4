"""``moe-runtime bench experts --formats``: from their codes, beside a read of as many bytes."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from moe_runtime.benchmarks.commands.tables import mean_cell, unit_of
from moe_runtime.cli.console import print_table
from moe_runtime.config import format_bytes, require_known

if TYPE_CHECKING:
    from moe_runtime.benchmarks.suite.peer_process import PeerProgram


def parse_formats(text: str, refused: dict[str, bool], peers: Sequence["PeerProgram"]) -> list[str]:
    """The formats of ``--formats``, each once.

    Args:
        text: names, with commas.
        refused: options, and whether they are given: they have no meaning here.
        peers: who shall take part.

    Raises:
        ValueError: a name is unknown, an option or a peer has nothing to do with them.
    """
    from moe_runtime.benchmarks.experts.format_layers import FORMATS
    from moe_runtime.benchmarks.suite.peer_files import describe_peer

    names = [*dict.fromkeys(word.strip() for word in text.split(","))]
    for name in names:
        require_known("format of --formats", name, tuple(FORMATS))
    if given := [option for option, is_given in refused.items() if is_given]:
        raise ValueError(f"--formats: forward passes in bfloat16 on a CPU alone, not {given[0]}")
    for one in peers:
        known = describe_peer(one.file)["FORMATS"]
        if not {*known} & {*names}:
            raise ValueError(f"--peer {one.name}: has {', '.join(known)}; none is in --formats")
    return names


def show_formats(results: dict[str, Any]) -> None:
    """Prints a row for each format, read and peer that has numbers."""
    shown = [one for one in results["measurements"] if one["summary"]]
    if not shown:
        return
    settings, columns, cells = (
        results["settings"],
        [("", "left")],
        [[one["system"]] for one in shown],
    )
    for number in settings["tokens"]:
        factor, unit = unit_of(shown, f"forward_{number}_s")
        columns += [(f"T={number}, {unit}", "right"), ("of a read", "right")]
        for one, row in zip(shown, cells, strict=True):
            share = one["summary"].get(f"forward_{number}_of_read")
            row += [
                mean_cell(one, f"forward_{number}_s", factor),
                f"{share['median']:.2f}" if share else "",
            ]
    title = (
        f"experts of {settings['model']}: E={settings['experts']} K={settings['top_k']} "
        f"D={settings['dim_model']} F={settings['dim_hidden']}, "
        f"at most {format_bytes(settings['memory'])} of a format"
    )
    print_table(title, columns, cells)
