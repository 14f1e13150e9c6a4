"""Machines written to files and read again; what is wrong is in tests/cli/test_simulate.py."""

from pathlib import Path

from moe_runtime.lab.simulate.scaling import ASSUMED, read_machine, write_machine
from moe_runtime.parallel.cluster import Cluster, Link


def test_a_machine_survives_its_file(tmp_path: Path) -> None:
    path = tmp_path / "machine.toml"
    measured = Cluster(
        num_ranks=1,
        ranks_per_node=4,
        processors_per_node=2,
        flops_per_s=5.5e10,
        launch_s=7e-3,
        copy_bytes_per_s=1.9e9,
        intra=Link(alpha_s=9e-4, bytes_per_s=8.1e8, occupies_compute=True),
        inter=Link(alpha_s=1e-3, bytes_per_s=1e8),
    )
    for machine in (measured, ASSUMED):
        write_machine(machine, path, "measured somewhere\non a Monday")
        assert read_machine(path) == machine
