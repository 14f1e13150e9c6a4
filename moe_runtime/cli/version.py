"""``moe-runtime --version``: which build this is, for whoever reports what it does."""

import moe_runtime
from moe_runtime.cli.console import print_json, require_address_space

_PACKAGES = ("python", "torch", "transformers", "triton")


def show_version(*, as_json: bool) -> None:
    """Prints the version with its commit, the native library and the libraries below.

    The first line comes at once: the others are known once torch is imported.
    """
    from moe_runtime.lab.this_machine import package_commit, versions

    version, commit = moe_runtime.__version__, package_commit()
    if not as_json:
        known = "" if commit == "unknown" else f" (commit {commit})"
        print(f"moe-runtime {version}{known}", flush=True)
    found = versions()
    installed = {name: found.get(name) for name in _PACKAGES}
    require_address_space()
    from moe_runtime.kernels.native import describe

    native = describe()
    if as_json:
        print_json(
            {
                "version": version,
                "commit": commit,
                "native": {
                    "built": list(native.built),
                    "usable": list(native.isas),
                    "isa": native.isa,
                    "problem": native.problem,
                },
                "versions": installed,
            }
        )
        return
    built = f"built for {', '.join(native.built)}; this machine runs {native.isa}"
    print(f"native library: {native.problem or built}")
    print(", ".join(f"{name} {number or 'not installed'}" for name, number in installed.items()))
