"""Options of other launchers that people type by habit, and what to write here instead."""

from __future__ import annotations

from collections.abc import Sequence

_WORKERS = dict.fromkeys(
    ("--nproc-per-node", "--nproc", "--np", "-np", "--num-processes", "--num-proc", "--world-size"),
    "--workers",
)
_JOIN = "other machines join a run: --here N --listen HOST:PORT --key FILE here, and `polyrhythm join` there"
_OTHERS = {"--max-restarts": "write --restarts R"}
_JOINING = (
    "--nnodes",
    "--node-rank",
    "--master-addr",
    "--master-port",
    "--rdzv-endpoint",
    "--rdzv-backend",
    "--rdzv-id",
)
_OTHERS |= dict.fromkeys(_JOINING, _JOIN)


def instead(arguments: Sequence[str]) -> str:
    """What to write instead of the first option of another launcher; "" if there is none."""
    for place, argument in enumerate(arguments):
        option, equals, value = argument.partition("=")
        known = option.replace("_", "-")
        if not equals and place + 1 < len(arguments):
            value = arguments[place + 1]
        if known in _WORKERS:
            number = value if value.isdigit() else "N"
            return f"{option} is not an option here; write {_WORKERS[known]} {number}"
        if known in _OTHERS:
            return f"{option} is not an option here; {_OTHERS[known]}"
    return ""
