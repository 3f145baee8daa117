"""KeyValues: values by key that all workers see, for the process groups of torch. Logic without I/O."""

from __future__ import annotations

from collections.abc import Callable

from polyrhythm.core.key_value import KeyValue, KeyValueReply
from polyrhythm.core.peer import Peer


class KeyValues:
    """The operations of `torch.distributed.Store`, each of which is atomic. None of them waits."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}

    def handle(self, peer: Peer, request: KeyValue, respond: Callable[[KeyValueReply], None]) -> None:
        """Handles the request of a worker."""
        values, key, value = self._values, request.key, request.value
        found = values.get(key)
        number = 0
        match request.operation:
            case "get":
                pass
            case "set":
                values[key] = value
            case "append":
                values[key] = (found or b"") + value
            case "add":
                number = int(found or b"0") + request.number
                values[key] = str(number).encode()
            case "compare":
                # A missing key counts as equal to an empty expectation.
                if found == request.expected or (found is None and not request.expected):
                    found = values[key] = value
            case "delete":
                number = int(values.pop(key, None) is not None)
            case "count":
                number = len(values)
        respond(KeyValueReply(found, number))
