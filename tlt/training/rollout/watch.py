"""Watches a phase on the leader: the progress in the replicas' heartbeats, once a second."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from tlt.base.records import IdleUse
from tlt.engine.backend import RolloutBackend
from tlt.engine.stats import EngineStats
from tlt.training.idle.work import IdleTime
from tlt.training.ranks.heartbeats import Heartbeats
from tlt.training.report.progress import Doing, PhaseProgress, ReplicaProgress
from tlt.training.rollout.work import FinishedResponses, ReplicaWork

WATCH_SECONDS = 1.0
NUM_RECENT = 10
_DOING = {IdleUse.AHEAD: Doing.AHEAD, IdleUse.TRAIN: Doing.TRAIN, IdleUse.REST: Doing.REST}

Show = Callable[[PhaseProgress | None], None]
"""Called from another thread; None: the phase has ended."""


def progress_of(
    engine: RolloutBackend, stats: EngineStats, work: ReplicaWork, ended: FinishedResponses, idle: IdleTime
) -> ReplicaProgress:
    """stats: the phase's own; the engine's may be of generation ahead."""
    if idle.use is not None:
        doing, longest = _DOING[idle.use], 0
    else:
        doing = Doing.TAKE_OVER if work.num_received else Doing.GENERATE
        longest = max((unfinished.num_tokens for unfinished in engine.running), default=0)
    return ReplicaProgress(len(ended.rollouts), stats.num_tokens, longest, doing)


@contextmanager
def watching(heartbeats: Heartbeats, num_responses: int, show: Show | None) -> Iterator[None]:
    if show is None:
        yield
        return
    is_over = threading.Event()
    watch = threading.Thread(
        target=_watch, args=(heartbeats, num_responses, show, is_over), name="tlt-progress", daemon=True
    )
    watch.start()
    try:
        yield
    finally:
        is_over.set()
        watch.join(WATCH_SECONDS)  # a store that does not answer keeps nobody
        show(None)


def _watch(heartbeats: Heartbeats, num_responses: int, show: Show, is_over: threading.Event) -> None:
    recent = deque[tuple[float, int]](maxlen=NUM_RECENT)
    with suppress(RuntimeError):  # the store is gone: the phase itself reports it
        while not is_over.wait(WATCH_SECONDS):
            replicas = [ReplicaProgress.decode(text) for text in heartbeats.told()]
            recent.append((time.monotonic(), sum(replica.tokens for replica in replicas)))
            if not is_over.is_set():
                show(PhaseProgress.of(replicas, num_responses, _speed(recent)))


def _speed(recent: deque[tuple[float, int]]) -> float | None:
    (begin, before), (end, now) = recent[0], recent[-1]
    return (now - before) / (end - begin) if end > begin else None
