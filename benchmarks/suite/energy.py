"""Joules of processors and GPUs, where this machine lets its users read them.

Sources: Linux's `Documentation/power/powercap/powercap.rst` (RAPL, readable by root alone) and
NVML's `nvmlDeviceGetTotalEnergyConsumption`. Both count the whole machine.
"""

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

POWERCAP = Path("/sys/class/powercap")


class EnergyMeter:
    """Measures the energy of a block. ``open_library`` raises ``OSError`` if there is no NVML."""

    def __init__(
        self, powercap: Path = POWERCAP, open_library: Callable[[str], Any] = ctypes.CDLL
    ) -> None:
        self._ranges = _ranges(powercap)
        self._nvml, self._gpus = _open_gpus(open_library)

    @contextmanager
    def measured(self) -> Iterator[dict[str, float]]:
        """``cpu_joules`` and ``gpu_joules`` of a block, once it has ended, where they can be read.

        A zone's counter wraps at about 262 kJ: two wraps in a block count as one.
        """
        found: dict[str, float] = {}
        zones, gpus = _microjoules(self._ranges), self._millijoules()
        yield found
        zones_after, gpus_after = _microjoules(self._ranges), self._millijoules()
        if zones and zones_after:
            used = (
                (zones_after[zone] - zones[zone]) % (most + 1)
                for zone, most in self._ranges.items()
            )
            found["cpu_joules"] = sum(used) / 1e6
        if gpus is not None and gpus_after is not None:
            found["gpu_joules"] = (gpus_after - gpus) / 1e3

    def _millijoules(self) -> int | None:
        used = [ctypes.c_ulonglong() for _ in self._gpus]
        for gpu, one in zip(self._gpus, used, strict=True):
            if self._nvml.nvmlDeviceGetTotalEnergyConsumption(gpu, ctypes.byref(one)):
                return None
        return sum(one.value for one in used) if used else None


def _ranges(powercap: Path) -> dict[Path, int]:
    """RAPL zones that add up to the machine (a package includes its cores), with their ranges."""
    found = {}
    for zone in sorted(powercap.glob("intel-rapl:*")):
        try:
            name = (zone / "name").read_text().strip()
            most = int((zone / "max_energy_range_uj").read_text())
        except (OSError, ValueError):
            continue
        if name.startswith("package") or name == "dram":
            found[zone] = most
    return found


def _microjoules(zones: dict[Path, int]) -> dict[Path, int] | None:
    try:
        return {zone: int((zone / "energy_uj").read_text()) for zone in zones}
    except (OSError, ValueError):
        return None


def _open_gpus(open_library: Callable[[str], Any]) -> tuple[Any, list[ctypes.c_void_p]]:
    try:
        nvml = open_library("libnvidia-ml.so.1")
    except OSError:
        return None, []
    count, gpus = ctypes.c_uint(), []
    if nvml.nvmlInit_v2() or nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)):
        return nvml, []
    for number in range(count.value):
        gpu = ctypes.c_void_p()
        if nvml.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(number), ctypes.byref(gpu)):
            return nvml, []
        gpus.append(gpu)
    return nvml, gpus
