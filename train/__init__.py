"""Makes the embedded model; not part of the product. Commands: `python -m train.NAME`, see README.md."""

import importlib.util
import sys

_ALWAYS = ("numpy", "tokenizers")
_WITH_TORCH = ("train.train", "train.draft", "train.evaluate", "train.export")


def _missing() -> list[str]:
    """What `python -m train.NAME` needs and this Python does not have; nothing for whoever imports the package."""
    command = next((a for flag, a in zip(sys.orig_argv, sys.orig_argv[1:], strict=False) if flag == "-m"), "")
    if not command.startswith("train."):
        return []
    needed = (*_ALWAYS, "torch") if command in _WITH_TORCH else _ALWAYS
    return [name for name in needed if importlib.util.find_spec(name) is None]


if _absent := _missing():
    _names = " and no ".join(_absent)
    sys.exit(f"train: this Python has no {_names}; make train/.venv as train/README.md says and use its python")
