"""python -m tests.features: runs every feature under every family and rewrites outcomes.json."""

from tests.features.outcomes import FILE, WORKS, renew, stored

renew()
for feature, by_strategy in stored().items():
    for strategy, outcome in by_strategy.items():
        if outcome != WORKS:
            print(f"{feature}, {strategy}: {outcome}")
print(f"written to {FILE}")
