"""Pages of the API reference: the public names of the package, rendered by mkdocstrings."""

from __future__ import annotations

import polyrhythm as pr

GROUPS = {
    "session": (
        "In a training script",
        ["init", "Session", "Pipeline", "Branches", "TensorParallel", "replicate"],
    ),
    "launch": ("Starting runs from Python", ["run", "simulate", "join", "RunResult", "Plan"]),
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

# Not public names, but what a strategy is given.
MORE = {"node": ["polyrhythm.core.group.Group", "polyrhythm.core.group.Task"]}


def pages() -> dict[str, str]:
    made = {f"reference/{name}.md": _page(name, *group) for name, group in GROUPS.items()}
    lines = [
        "# API reference",
        "",
        "The names that `import polyrhythm as pr` gives, and the types that a strategy is given.",
        "",
    ]
    for name, (title, members) in GROUPS.items():
        links = ", ".join(f"[`{member}`]({name}.md#{path(member)})" for member in members)
        links += "".join(f", [`{each.split('.')[-1]}`]({name}.md#{each})" for each in MORE.get(name, ()))
        lines.append(f"- [{title}]({name}.md): {links}")
    made["reference/index.md"] = "\n".join(lines) + "\n"
    return made


def _page(name: str, title: str, members: list[str]) -> str:
    paths = [*map(path, members), *MORE.get(name, ())]
    return f"# {title}\n\n" + "\n".join(f"::: {each}\n" for each in paths)


def path(name: str) -> str:
    """Where a public name is defined."""
    value = getattr(pr, name)
    return value.__name__ if name == "integrations" else f"{value.__module__}.{value.__qualname__}"
