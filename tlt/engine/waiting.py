"""The queue of requests, counted by limit: a step's cost must not grow with the queue."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Iterator

from tlt.base.types import Request


class Waiting:
    """num_by_limit: requests by max_tokens."""

    def __init__(self) -> None:
        self._requests: deque[Request] = deque()
        self.num_by_limit: Counter[int] = Counter()

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests)

    @property
    def first(self) -> Request:
        return self._requests[0]

    def extend(self, requests: Iterable[Request]) -> None:
        for request in requests:
            self._requests.append(request)
            self.num_by_limit[request.params.max_tokens] += 1

    def put_first(self, request: Request) -> None:
        self._requests.appendleft(request)
        self.num_by_limit[request.params.max_tokens] += 1

    def take_first(self) -> Request:
        return self._without(self._requests.popleft())

    def take_last(self) -> Request:
        return self._without(self._requests.pop())

    def clear(self) -> None:
        self._requests.clear()
        self.num_by_limit.clear()

    def _without(self, request: Request) -> Request:
        limit = request.params.max_tokens
        self.num_by_limit[limit] -= 1
        if not self.num_by_limit[limit]:
            del self.num_by_limit[limit]
        return request
