"""Pages of the API reference: the public names of the package, rendered by mkdocstrings."""

from __future__ import annotations

import polyrhythm as pr

GROUPS = {
    "session": ("In a training script", ["init", "Session"]),
    "launch": ("Starting runs from Python", ["run", "simulate", "join", "Plan"]),
    "strategy": ("Writing a strategy", ["Strategy", "Traits", "Worker", "Server", "MeanReducer", "parse"]),
    "codec": ("Writing a codec", ["Codec", "Reduction"]),
    "node": ("What a strategy works with", ["Node", "Message", "Peer", "Replica", "Shard"]),
    "optim": ("Optimizers", ["LinearScaling", "LARS", "LAMB", "SparseSGD"]),
    "errors": (
        "Errors",
        ["PolyrhythmError", "UsageError", "WireError", "WaitError", "PeerLost", "NotFinite"],
    ),
    "integrations": ("Integrations", ["integrations"]),
}


def pages() -> dict[str, str]:
    made = {f"reference/{name}.md": _page(*group) for name, group in GROUPS.items()}
    lines = ["# API reference", "", "The names that `import polyrhythm as pr` gives.", ""]
    for name, (title, members) in GROUPS.items():
        links = ", ".join(f"[`{member}`]({name}.md#{path(member)})" for member in members)
        lines.append(f"- [{title}]({name}.md): {links}")
    made["reference/index.md"] = "\n".join(lines) + "\n"
    return made


def _page(title: str, members: list[str]) -> str:
    return f"# {title}\n\n" + "\n".join(f"::: {path(member)}\n" for member in members)


def path(name: str) -> str:
    """Where a public name is defined."""
    value = getattr(pr, name)
    return value.__name__ if name == "integrations" else f"{value.__module__}.{value.__qualname__}"
