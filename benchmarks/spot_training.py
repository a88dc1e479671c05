"""What a run's idle time was used for: shares and percentiles from its metrics and timeline.

python -m benchmarks.spot_training runs/quickstart
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from tlt.report.metrics import percentile, read_metrics
from tlt.report.timeline import critical_path_share, read_spans


def p50_p99(values: Sequence[float], form: str) -> str:
    return f"p50 {percentile(values, 50):{form}}, p99 {percentile(values, 99):{form}}"


def main(run: Path) -> None:
    records = read_metrics(run / "metrics.jsonl")
    idle = sum(record.idle_seconds for record in records)
    preemptions = [seconds for record in records for seconds in record.preemption_seconds]
    shares = [max(record.preemption_seconds) / record.step_seconds for record in records if record.preemption_seconds]
    trained = sum(record.drafter_tokens for record in records)
    captured = sum(record.drafter_captured_tokens for record in records)
    recomputed = sum(record.drafter_recomputed_tokens for record in records)
    print(f"steps                        {len(records)}")
    print(f"idle seconds used            {sum(r.drafter_train_seconds for r in records) / idle:.1%} of {idle:.1f}")
    print(f"on the critical path         {critical_path_share(read_spans(run)):.2%} of the steps' seconds")
    print(f"preemption seconds           {p50_p99(preemptions, '.4f')}")
    print(f"preemption, share of a step  {p50_p99(shares, '.2%')}")
    print(f"tokens trained on            {trained:,}, {captured / max(trained, 1):.0%} with captured features")
    print(f"tokens recomputed            {recomputed:,}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
