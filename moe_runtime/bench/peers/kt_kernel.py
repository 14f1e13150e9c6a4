"""kt-kernel's experts in bf16: its extension alone, installed or unpacked (``=FOLDER``)."""

import importlib.util
from pathlib import Path
from typing import Any

INSTALL = "pip install --no-deps kt-kernel && pip install numpy"
PACKAGES = ("kt-kernel", "numpy")
CASES = ("experts",)
_BEST_FIRST = ("avx512_bf16", "avx512_vbmi", "avx512_vnni", "avx512_base", "avx2")
_FLAGS = {"avx512_base": "avx512f", "avx512_vbmi": "avx512vbmi"}


class Peer:
    """Needs ``model`` (None: installed), ``num_threads``, ``top_k`` and ``most_tokens``."""

    def __init__(self, settings: dict[str, Any]) -> None:
        import numpy

        self._numpy, self._settings = numpy, settings
        self._api: Any = find_extension(settings["model"])
        self._pool = self._api.CPUInfer(settings["num_threads"])

    def load_experts(self, gate: Any, up: Any, down: Any) -> None:
        """Takes a copy of the weights, bf16 as it lies: ``[E, F, D]`` twice, ``[E, D, F]``."""
        settings, sizes = self._settings, (gate.shape[2], gate.shape[1])
        config = self._api.moe.MOEConfig(len(gate), settings["top_k"], *sizes, 0)
        config.max_len, config.pool = max(64, settings["most_tokens"]), self._pool.backend_
        for name, array in (("gate", gate), ("up", up), ("down", down)):
            setattr(config, f"{name}_proj", array.ctypes.data)
            setattr(config, f"{name}_scale", 0)
        kinds = [getattr(self._api.moe, f"{one}BF16_MOE", None) for one in ("AMX", "AVX2")]
        self._experts = next(kind for kind in kinds if kind)(config)
        order = self._numpy.arange(len(gate))
        self._pool.submit(self._experts.load_weights_task(order.ctypes.data))
        self._pool.sync()

    def experts(self, x: Any, ids: Any, weights: Any, out: Any) -> None:
        """Fills ``out`` ``[T, D]``, as ``x`` in bf16; ids ``[T, K]`` int64, gate weights fp32."""
        count = self._numpy.array([len(x)], self._numpy.int32)
        number, *arrays = (one.ctypes.data for one in (count, ids, weights, x, out))
        self._pool.submit(self._experts.forward_task(number, ids.shape[1], *arrays, False))
        self._pool.sync()


def find_extension(folder: str | None) -> Any:
    """The module for the processor's best instruction set, of a folder or of the environment."""
    found: Any = importlib.util.find_spec("kt_kernel") if folder is None else None
    home = Path(found.origin).parent if found else Path(folder or ".", "kt_kernel")
    known = Path("/proc/cpuinfo").read_text().partition("flags")[2].partition("\n")[0].split()
    variants = [one for one in _BEST_FIRST if _FLAGS.get(one, one) in known]
    files = [file for one in variants for file in home.glob(f"_kt_kernel_ext_{one}.*.so")]
    if not files:
        raise ImportError(f"no kt_kernel for {', '.join(variants) or 'this processor'} in {home}")
    spec: Any = importlib.util.spec_from_file_location("kt_kernel_ext", files[0])
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
