"""distribute: `fit` of a Keras model trains by the strategy of a run.

    from polyrhythm.integrations.keras import distribute

    model.compile(...)
    distribute(model)
    model.fit(x, y)

Keras runs on torch: set KERAS_BACKEND=torch before the first `import keras`. Outside a run `distribute`
changes nothing.
"""

from __future__ import annotations

import os
import sys

if "keras" not in sys.modules:
    os.environ.setdefault("KERAS_BACKEND", "torch")

try:
    import keras
except ModuleNotFoundError as error:
    from polyrhythm.core.errors import UsageError

    if error.name == "keras":
        raise UsageError("Keras is not installed: pip install 'polyrhythm[keras]'") from error
    raise UsageError(
        f"Keras cannot start with KERAS_BACKEND={os.environ.get('KERAS_BACKEND')} ({error}): set "
        "KERAS_BACKEND=torch before the first `import keras`"
    ) from error

if keras.backend.backend() != "torch":
    from polyrhythm.core.errors import UsageError

    raise UsageError(
        f"Keras runs on {keras.backend.backend()}, and polyrhythm needs torch: set KERAS_BACKEND=torch "
        "before the first `import keras`"
    )

from polyrhythm.integrations.keras.model import distribute
from polyrhythm.integrations.keras.optimizer import KerasOptimizer

__all__ = ["KerasOptimizer", "distribute"]
