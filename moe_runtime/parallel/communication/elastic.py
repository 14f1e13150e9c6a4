"""A group whose processes come and go, by torch's own rendezvous.

The first process opens the store and takes part in every group. When another one comes or is lost,
all leave the group and meet in the next one. Groups use gloo.
"""

from __future__ import annotations

import contextlib
import gc
import json
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any

from torch import Tensor

from moe_runtime.errors import MoERuntimeError, RankFailureError
from moe_runtime.parallel.communication.transport import (
    FlatTransport,
    LocalTransport,
    Pending,
    Transport,
    open_store,
    open_transport,
)

PORT = 29400
"""That of torch's launcher."""
_CONNECT_S, _MEET_S = 60.0, 10.0
"""Seconds until the store must answer, and in which the processes of a rendezvous must meet."""
_LOADING = timedelta(hours=1)
_TIMES = {"last_call_timeout": 3, "keep_alive_interval": 1, "keep_alive_max_attempt": 5}
"""Seconds. Processes that wait look once a second whether they may join; one without a sign of life
for five seconds is lost."""
_LASTS_S = 10.0
"""A group lasts so long before others may join."""


class ElasticError(MoERuntimeError):
    """This process can be in no further group."""


class GroupChangedError(RankFailureError):
    """The group ends because another process waits to join."""


class ElasticGroup:
    """The transport of the present group; before the first one, of this process alone.

    Attributes:
        is_first: whether this is the first process, rank 0 of every group.
        port: of the store.
    """

    def __init__(
        self,
        host: str,
        port: int,
        sizes: tuple[int, int] | None = None,
        say: Callable[[str], None] = lambda line: None,
    ) -> None:
        """Opens the store, if given the fewest and the most processes of a group; else connects.

        The environment has TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1: otherwise a process that comes
        later waits for an address that torch wrote only once.

        Raises:
            RankFailureError: no store answers there, or the port is taken.
        """
        self.is_first, self.say = sizes is not None, say
        self._inner: Transport = LocalTransport()
        self.rank, self.size, self._formed_s = 0, 1, 0.0
        try:
            store: Any = open_store(host, port, is_keeper=self.is_first, timeout_s=_CONNECT_S)
            if sizes is not None:
                store.set("moe/sizes", json.dumps(sizes))
            self.fewest, self.most = json.loads(store.get("moe/sizes"))
        except RuntimeError as error:
            what = "cannot be opened" if self.is_first else "does not answer"
            reason = str(error).splitlines()[0]
            raise RankFailureError(f"the rendezvous {host}:{port} {what}: {reason}") from None
        store.set_timeout(timedelta(seconds=_MEET_S))
        self.port = store.port
        self._store, self._name = store, secrets.token_hex(8)
        self._rendezvous = self._handler(store)

    def _handler(self, store: Any) -> Any:
        from torch.distributed.elastic.rendezvous import RendezvousParameters
        from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import (
            C10dRendezvousBackend,
        )
        from torch.distributed.elastic.rendezvous.dynamic_rendezvous import create_handler

        # torch takes two processes with the same address and number for one
        own = RendezvousParameters("c10d", "", "moe", self.fewest, self.most, self._name, **_TIMES)
        return create_handler(store, C10dRendezvousBackend(store, "moe"), own)

    def exchange_numbers(self, numbers_PN: Tensor) -> Tensor:
        return self._inner.exchange_numbers(numbers_PN)

    def routes(self, sent_CP: Tensor, received_CP: Tensor) -> Sequence[object]:
        return self._inner.routes(sent_CP, received_CP)

    def exchange(self, rows_RD: Tensor, route: object, **options: Any) -> Pending:
        return self._inner.exchange(rows_RD, route, **options)

    @property
    def is_awaited(self) -> bool:
        """Whether another process may join, and waits."""
        is_due = time.monotonic() > self._formed_s + _LASTS_S
        return is_due and self._rendezvous.num_nodes_waiting() > 0

    def agree(self, key: str, facts: dict[str, str]) -> None:
        """Raises ElasticError: a fact of this key differs from that of the first process."""
        if self.is_first:
            self._store.set(f"moe/{key}", json.dumps(facts))
            return
        with _lost("the first process"):
            self._store.wait([f"moe/{key}"], _LOADING)
            theirs = json.loads(self._store.get(f"moe/{key}"))
        differing = [name for name in facts if facts[name] != theirs.get(name)]
        if differing:
            raise ElasticError(
                f"this process differs from the service in {', '.join(differing)}; start it with "
                "the same version, model and settings"
            )

    def form(self, divide: Callable[[list[str]], Any]) -> Any:
        """Meets the others in the next group.

        Args:
            divide: gets the lasting names of the processes by rank; called by the first process.

        Returns:
            What the first process's ``divide`` returned, by JSON.

        Raises:
            RankFailureError: a process was lost meanwhile; call it again.
            ElasticError: too few came, or the first process is gone.
        """
        from torch.distributed.elastic.rendezvous import RendezvousError, RendezvousTimeoutError

        if isinstance(self._inner, FlatTransport):
            self._inner.leave()
        self._inner = LocalTransport()
        gc.collect()  # frames of an error keep connections open
        try:
            info = self._rendezvous.next_rendezvous()
        except RendezvousTimeoutError:
            raise ElasticError(
                f"fewer than {self.fewest} processes came in ten minutes; start more with --join"
            ) from None
        except RendezvousError:
            raise ElasticError("the service that this process joined has ended") from None
        size, rank, store = info.world_size, info.rank, info.store
        with _lost("a process"):
            if self.is_first:
                store.set("first", str(rank))
            rank = 0 if self.is_first else rank or int(store.get("first"))
            store.set(f"name/{rank}", self._name)
            if self.is_first:
                names = [store.get(f"name/{rank}").decode() for rank in range(size)]
                store.set("divided", json.dumps(divide(names)))
            divided = json.loads(store.get("divided"))
        self._inner = open_transport(store, rank, size, meet_s=_MEET_S)
        self.rank, self.size, self._formed_s = rank, size, time.monotonic()
        if not self.is_first:
            self.say(f"rank {rank} of {size} processes")
        return divided

    def close(self) -> None:
        """Ends the rendezvous for all processes; from any thread."""
        self._handler(self._store.clone()).shutdown()


@contextlib.contextmanager
def _lost(what: str) -> Iterator[None]:
    """Turns an error of the store into one that says what was lost."""
    try:
        yield
    except RuntimeError as error:
        raise RankFailureError(f"{what} was lost: {str(error).splitlines()[0]}") from None
