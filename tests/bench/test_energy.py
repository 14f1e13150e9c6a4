"""Joules from a folder of RAPL's zones and a library that stand in for the machine's."""

import ctypes
from pathlib import Path
from typing import Any

import pytest

from moe_runtime.benchmarks.suite.energy import EnergyMeter

RANGE = 262_143_328_850
ZONES = {
    # what adds up to the machine, its parts, and the whole that has the packages in it
    "intel-rapl:0": ("package-0", RANGE),
    "intel-rapl:0:0": ("core", RANGE),
    "intel-rapl:0:1": ("dram", 65_712_999_613),
    "intel-rapl:1": ("package-1", RANGE),
    "intel-rapl:2": ("psys", RANGE),
    # the same package by another way
    "intel-rapl-mmio:0": ("package-0", RANGE),
}


def write_zones(folder: Path) -> None:
    for zone, (name, most) in ZONES.items():
        (folder / zone).mkdir()
        (folder / zone / "name").write_text(f"{name}\n")
        (folder / zone / "max_energy_range_uj").write_text(f"{most}\n")
        count(folder, zone, 10**6)
    (folder / "intel-rapl").mkdir()
    (folder / "intel-rapl" / "enabled").write_text("1\n")


def count(folder: Path, zone: str, microjoules: int) -> None:
    (folder / zone / "energy_uj").write_text(f"{microjoules}\n")


def no_library(name: str) -> Any:
    raise OSError(f"{name}: cannot open shared object file")


class Nvml:
    """Stands in for NVML: counters of two GPUs, and functions that answer with an error."""

    def __init__(self, *failing: str) -> None:
        self.millijoules, self._failing = {1001: 5_000_000_000, 1002: 7_000}, failing

    def __call__(self, name: str) -> "Nvml":
        assert name == "libnvidia-ml.so.1"
        return self

    def nvmlInit_v2(self) -> int:
        return self._answer("init")

    def nvmlDeviceGetCount_v2(self, count: Any) -> int:
        count._obj.value = len(self.millijoules)
        return self._answer("count")

    def nvmlDeviceGetHandleByIndex_v2(self, number: ctypes.c_uint, gpu: Any) -> int:
        gpu._obj.value = [*self.millijoules][number.value]
        return self._answer("handle")

    def nvmlDeviceGetTotalEnergyConsumption(self, gpu: ctypes.c_void_p, used: Any) -> int:
        assert gpu.value is not None
        used._obj.value = self.millijoules[gpu.value]
        return self._answer("energy")

    def _answer(self, name: str) -> int:
        return 3 if name in self._failing else 0


def test_packages_and_memory_add_up_and_begin_again(tmp_path):
    write_zones(tmp_path)
    count(tmp_path, "intel-rapl:1", RANGE - 499_999)
    meter = EnergyMeter(tmp_path, no_library)
    with meter.measured() as joules:
        assert joules == {}
        count(tmp_path, "intel-rapl:0", 3_500_000)
        count(tmp_path, "intel-rapl:0:0", 3_000_000)
        count(tmp_path, "intel-rapl:0:1", 1_250_000)
        # Beyond its largest value it begins at 0: 0.5 J up to there, 1 J after it.
        count(tmp_path, "intel-rapl:1", 1_000_000)
        count(tmp_path, "intel-rapl:2", 9_000_000)
        count(tmp_path, "intel-rapl-mmio:0", 9_000_000)
    assert joules == {"cpu_joules": pytest.approx(2.5 + 0.25 + 1.5, rel=1e-12)}
    with meter.measured() as joules:
        pass
    assert joules == {"cpu_joules": 0.0}


@pytest.mark.parametrize("when", ["never", "before", "within"])
def test_what_cannot_be_read_is_left_out(when, tmp_path):
    """A folder in the place of a counter refuses to be read, to root as well."""
    if when != "never":
        write_zones(tmp_path)

    def hide() -> None:
        (tmp_path / "intel-rapl:1" / "energy_uj").unlink()
        (tmp_path / "intel-rapl:1" / "energy_uj").mkdir()

    if when == "before":
        hide()
    meter = EnergyMeter(tmp_path, no_library)
    with meter.measured() as joules:
        if when == "within":
            hide()
    assert joules == {}


def test_gpus_add_up(tmp_path):
    nvml = Nvml()
    with EnergyMeter(tmp_path, nvml).measured() as joules:
        nvml.millijoules[1001] += 1500
        nvml.millijoules[1002] += 250
    assert joules == {"gpu_joules": 1.75}


@pytest.mark.parametrize("failing", ["init", "count", "handle", "energy"])
def test_a_gpu_that_does_not_say_is_left_out(failing, tmp_path):
    with EnergyMeter(tmp_path, Nvml(failing)).measured() as joules:
        pass
    assert joules == {}


def test_this_machine_is_asked_without_fuss():
    with EnergyMeter().measured() as joules:
        pass
    assert joules.keys() <= {"cpu_joules", "gpu_joules"}
    assert all(value >= 0 for value in joules.values())
