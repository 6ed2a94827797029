"""Examples below the help of each command, and how a shell completes the command."""

from __future__ import annotations

from collections.abc import Mapping

COMPLETION = """\b
Completion, for the shell of this session:
  eval "$(_SPARK_ABS_COMPLETE=bash_source spark-abs)"
  eval "$(_SPARK_ABS_COMPLETE=zsh_source spark-abs)"
  _SPARK_ABS_COMPLETE=fish_source spark-abs | source"""

EXAMPLES: Mapping[str, tuple[str, ...]] = {
    "list": ("list /data/shop", "list s3://lake/shop --output json"),
    "show": ("show /data/shop latest", "show /data/shop before-release"),
    "state": (
        "state /data/shop totals",
        "state /data/shop totals --checkpoint 7 --diff before-release",
        "state /data/shop totals --export /data/state-of-totals",
    ),
    "status": ("status /data/shop",),
    "history": ("history /data/shop --limit 50",),
    "report": ("report /data/shop", "report /data/shop -o -"),
    "serve": ("serve /data/shop", "serve /data/shop --port 0"),
    "savepoint": ("savepoint /data/shop before-release", "savepoint /data/shop nightly --timeout 5m"),
    "checkpoint": ("checkpoint /data/shop", "checkpoint /data/shop --timeout 5m"),
    "cancel": ("cancel /data/shop 12", "cancel /data/shop nightly"),
    "pause": ("pause /data/shop", "pause /data/shop clicks"),
    "resume": ("resume /data/shop", "resume /data/shop clicks"),
    "restart": ("restart /data/shop totals",),
    "skip-file": ("skip-file /data/shop orders file:///data/orders/17.json.gz",),
    "set": ("set /data/shop interval=30s", "set /data/shop mode=unaligned timeout=20m"),
    "stop": ("stop /data/shop", "stop /data/shop --savepoint before-release"),
    "forget": ("forget /data/shop orders",),
    "dispose": ("dispose /data/shop before-release",),
    "restore": (
        "restore /data/shop --to before-release --dry-run",
        "restore /data/shop --to latest --fallback",
        "restore /data/shop --before 2026-01-31T20:15 --yes",
    ),
    "rewind": ("rewind --checkpoints '/checkpoints/*' --tables '/lake/*' --dry-run",),
    "verify": ("verify /data/shop", "verify /data/shop latest"),
    "check": ("check job.py --root /data/shop", "check job.py --root /data/shop -- --date 2026-01-31"),
    "doctor": ("doctor", "doctor /data/shop"),
    "guide": ("guide", "guide restore-runbook"),
}
"""Command to calls of it, without the name of the program."""


def examples(command: str) -> str | None:
    """Return the examples of a command as click takes them; None if there are none."""
    calls = EXAMPLES.get(command)
    if not calls:
        return None
    lines = [f"  spark-abs {call}" for call in calls]
    return "\n".join(("\b", "Examples:" if len(lines) > 1 else "Example:", *lines))
