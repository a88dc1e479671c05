"""A process that scores responses."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from multiprocessing.connection import Connection
from typing import Any

from tlt.base.types import Reward
from tlt.tasks.rewards.scoring import Call, RewardSpec, Scorer
from tlt.tasks.workers import Worker, serve


def start_worker(spec: RewardSpec) -> Worker:
    return Worker("tlt.tasks.rewards.worker:run_worker", json.dumps(asdict(spec)), _fits, "scored")


def _fits(rewards: Any, call: Call) -> bool:
    is_list = isinstance(rewards, list) and len(rewards) == len(call.responses)
    return is_list and all(isinstance(one, Reward) for one in rewards)


def run_worker(pipe: Connection[Any, Any], spec: str) -> None:
    def begin() -> Callable[[Call], list[Reward]]:
        scorer = Scorer(RewardSpec(**json.loads(spec)))
        scorer.warm_up()
        return scorer.answer

    serve(pipe, begin, Call.refused)
