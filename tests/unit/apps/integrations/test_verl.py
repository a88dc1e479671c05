"""verl's registries, as docs/embedding.md describes them. Skipped where verl is not installed."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("verl")
pytestmark = pytest.mark.filterwarnings("ignore")


def test_verl_takes_a_replica_and_an_adapter_under_a_new_name(monkeypatch: pytest.MonkeyPatch) -> None:
    from verl.workers.rollout import base
    from verl.workers.rollout.replica import RolloutReplica, RolloutReplicaRegistry, TokenOutput

    assert RolloutReplica.__abstractmethods__ == {"launch_servers"}
    assert base.BaseRollout.__abstractmethods__ == {"resume", "release", "update_weights"}
    assert {"token_ids", "log_probs", "stop_reason"} <= TokenOutput.model_fields.keys()

    def load() -> type[Any]:
        return RolloutReplica

    monkeypatch.setattr(RolloutReplicaRegistry, "_registry", dict(RolloutReplicaRegistry._registry))
    RolloutReplicaRegistry.register("tlt", load)
    assert RolloutReplicaRegistry.get("tlt") is RolloutReplica
    monkeypatch.setitem(base._ROLLOUT_REGISTRY, ("tlt", "async"), "verl.workers.rollout.base.BaseRollout")
    assert base.get_rollout_class("tlt", "async") is base.BaseRollout
