"""A stand-in for swiftlite.api, so that the command line is tried without torch."""

import sys
import types

import swiftlite

RESULTS = {
    "train": None,
    "check": {"steps": 3},
    "export": None,
    "evaluate": {"loss": 0.5, "perplexity": 1.6487, "rows": 2, "trained_tokens": 9, "dropped": {}},
    "generate": None,
    "chat": None,
    "download": "/cache/x",
    "selftest": {"failed": []},
}


def stand_in_api(monkeypatch):
    """Puts the stand-in in place. `.calls` collects `(name, args, kwargs)`; `.fail` is raised when set."""
    module = types.ModuleType("swiftlite.api")
    module.calls, module.fail = [], None

    def add(name, result):
        def call(*args, **kwargs):
            module.calls.append((name, args, kwargs))
            if module.fail is not None:
                raise module.fail
            return result

        setattr(module, name, call)

    for name, result in RESULTS.items():
        add(name, result)
    monkeypatch.setitem(sys.modules, "swiftlite.api", module)
    monkeypatch.setattr(swiftlite, "api", module, raising=False)
    return module
