"""CoordinatorStore: the key-value store of a run for torch.distributed.

Values are at the coordinator, so the store works on one host and between hosts, opens no port, and is
encrypted and authenticated like all messages of the run. It ends with the run.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist
from torch._C._distributed_c10d import Store  # the type behind torch.distributed.Store

from polyrhythm.core.errors import PeerLost
from polyrhythm.core.key_value import KeyValue, KeyValueReply
from polyrhythm.session.context import WorldContext

_FIRST_PAUSE, _LAST_PAUSE = 0.0005, 0.05  # seconds between two looks at a key


class CoordinatorStore(Store):
    """A `torch.distributed.Store`. Process groups are few, so a wait just asks again and again."""

    def __init__(self, context: WorldContext) -> None:
        super().__init__()
        self._context = context
        self._timeout = timedelta(seconds=context.plan.timeout)

    @property
    def timeout(self) -> timedelta:
        return self._timeout

    def set_timeout(self, timeout: timedelta) -> None:
        self._timeout = timeout

    def clone(self) -> CoordinatorStore:
        return self

    def set(self, key: str, value: str | bytes) -> None:
        self._request(KeyValue("set", key, _bytes(value)))

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self._request(KeyValue("get", key)).value or b""

    def add(self, key: str, value: int) -> int:
        return self._request(KeyValue("add", key, number=value)).number

    def append(self, key: str, value: str | bytes) -> None:
        self._request(KeyValue("append", key, _bytes(value)))

    def compare_set(self, key: str, expected_value: str | bytes, desired_value: str | bytes) -> bytes:
        expected = _bytes(expected_value)
        found = self._request(KeyValue("compare", key, _bytes(desired_value), expected)).value
        return expected if found is None else found

    def delete_key(self, key: str) -> bool:
        return bool(self._request(KeyValue("delete", key)).number)

    def num_keys(self) -> int:
        return self._request(KeyValue("count")).number

    deleteKey, getNumKeys = delete_key, num_keys  # what C++ calls them

    def check(self, keys: Sequence[str]) -> bool:
        return all(self._request(KeyValue("get", key)).value is not None for key in keys)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        began, pause = time.monotonic(), _FIRST_PAUSE
        limit = (timeout or self._timeout).total_seconds()
        while not self.check(keys):
            waited = time.monotonic() - began
            if self._context.node.stopping.alone:
                raise PeerLost(f"{self._context.me} waited for {list(keys)}; the run has failed")
            if waited > limit:
                raise dist.DistStoreError(f"{self._context.me} waited {waited:.1f} s for {list(keys)}")
            time.sleep(pause)
            pause = min(2 * pause, _LAST_PAUSE)

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        return [self.get(key) for key in keys]

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    def has_extended_api(self) -> bool:
        return True

    def _request(self, request: KeyValue) -> KeyValueReply:
        return self._context.request(request)


def _bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)
