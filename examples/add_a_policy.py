"""An eviction policy of your own beside built-in ones, on a trace of your own.

moe-runtime run MODEL --prompt "..." --trace trace.npz
python examples/add_a_policy.py trace.npz

Without a trace one of the pocket model is recorded. `run --policy examples/add_a_policy.py` runs a
model with it; CONTRIBUTING.md says how a policy gets a name.
"""

import sys
import tempfile
from pathlib import Path

from moe_runtime.cli.main import main as moe_runtime_command
from moe_runtime.lab.replay.untimed import replay_demand
from moe_runtime.lab.traces import read_trace
from moe_runtime.lab.traces.workload import workload_of
from moe_runtime.models.pocket import pocket_path
from moe_runtime.policies.eviction.base import Evictable, EvictionPolicy, K
from moe_runtime.policies.eviction.classic import LFU, LRU


class FirstIn(EvictionPolicy[K]):
    """Evicts what was loaded first, however often it was used since."""

    def __init__(self) -> None:
        self._held: dict[K, None] = {}

    def touch(self, key: K) -> None:
        """Notes a use, which changes nothing here."""
        self._held[key]

    def insert(self, key: K) -> None:
        """Starts to hold a key as the youngest."""
        if key in self._held:
            raise ValueError(f"{key} is held already")
        self._held[key] = None

    def remove(self, key: K) -> None:
        """Stops holding a key."""
        del self._held[key]

    def victim(self, evictable: Evictable, incoming: K) -> K | None:
        """The oldest key that may be evicted."""
        return next((key for key in self._held if evictable(key)), None)

    def check(self) -> None:
        """Nothing can contradict itself here."""

    def __len__(self) -> int:
        return len(self._held)

    def __contains__(self, key: object) -> bool:
        return key in self._held


def compare(trace: Path) -> None:
    """Prints the share of accesses that each policy finds in memory, with half of the experts."""
    workload = workload_of(read_trace(trace))
    signature = workload.trace.signature
    num_slots = signature.num_layers * signature.num_experts // 2
    for policy in (LRU, LFU, FirstIn):
        replay = replay_demand(workload, lambda keys, policy=policy: policy(), num_slots)
        print(f"{policy.__name__:8} {replay.hit_rate:.3f}")


if __name__ == "__main__":
    if sys.argv[1:]:
        compare(Path(sys.argv[1]))
    else:
        with tempfile.TemporaryDirectory() as folder:
            recorded = Path(folder) / "trace.npz"
            words = ["run", str(pocket_path()), "-p", "Lists are", "-n", "40", "--trace"]
            assert moe_runtime_command([*words, str(recorded)]) == 0
            compare(recorded)
