"""kt-kernel's experts: its extension alone, installed or unpacked (``=FOLDER``)."""

import importlib.util
from pathlib import Path
from typing import Any

INSTALL = "pip install --no-deps kt-kernel && pip install numpy"
PACKAGES = ("kt-kernel", "numpy")
CASES = ("experts",)
VARIANTS = ("one_thread",)
FORMATS = ("bf16", "fp8", "mxfp4", "int4-int8")
_NAMES = {"fp8": ["FP8"], "mxfp4": ["FP4_KGroup", "MXFP4"], "int4-int8": ["Int4_KGroup", "RawInt4"]}
_BEST_FIRST = ("amx", "avx512_bf16", "avx512_vbmi", "avx512_vnni", "avx512_base", "avx2")
_FLAGS = {"amx": "amx_tile", "avx512_base": "avx512f", "avx512_vbmi": "avx512vbmi"}


class Peer:
    """Needs settings ``model`` (or None), ``format``, ``num_threads`` and more of the case's."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self._settings, self._numpy = settings, importlib.import_module("numpy")
        self._api = find_extension(settings["model"])
        self._pool = self._api.CPUInfer(1 if settings["variant"] else settings["num_threads"])

    def load_experts(self, *parts: Any) -> None:
        """Copy bf16 weights ``[E, F, D]`` twice and ``[E, D, F]``, or codes and scales."""
        kind, moe, (count, width) = self._settings["format"], self._api.moe, parts[0].shape[:2]
        config = moe.MOEConfig(count, self._settings["top_k"], parts[2].shape[1], width, 0)
        config.max_len, config.pool = max(64, self._settings["most_tokens"]), self._pool.backend_
        words = (f"{name}_{part}s" for part in ("proj", "scale") for name in ("gate", "up", "down"))
        for word, array in zip(words, parts, strict=False):
            setattr(config, word, [[one.ctypes.data for one in array]])
        quant, order = config.quant_config, self._numpy.arange(count)
        quant.bits, quant.group_size = (8, 128) if kind == "fp8" else (4, 32)
        names = (f"{isa}{end}_MOE" for end in _NAMES.get(kind, ["BF16"]) for isa in ("AMX", "AVX2"))
        self._experts = next(getattr(moe, one) for one in names if hasattr(moe, one))(config)
        self._pool.submit(self._experts.load_weights_task(order.ctypes.data))
        self._pool.sync()

    def experts(self, x: Any, ids: Any, weights: Any, out: Any) -> None:
        """Fill ``out`` ``[T, D]``, in bf16 like ``x``; ids ``[T, K]`` int64, gate weights fp32."""
        count = self._numpy.array([len(x)], self._numpy.int32)
        number, *arrays = (one.ctypes.data for one in (count, ids, weights, x, out))
        self._pool.submit(self._experts.forward_task(number, ids.shape[1], *arrays, False))
        self._pool.sync()


def find_extension(folder: str | None) -> Any:
    """The module for the best supported instruction set, in a folder or the environment."""
    found: Any = importlib.util.find_spec("kt_kernel") if folder is None else None
    home = Path(found.origin).parent if found else Path(folder or ".", "kt_kernel")
    known = Path("/proc/cpuinfo").read_text().split()
    variants = [one for one in _BEST_FIRST if _FLAGS.get(one, one) in known]
    files = [file for one in variants for file in home.glob(f"_kt_kernel_ext_{one}.*.so")]
    if not files:
        raise ImportError(f"no kt_kernel for {', '.join(variants) or 'this processor'} in {home}")
    spec: Any = importlib.util.spec_from_file_location("kt_kernel_ext", files[0])
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
