"""LoRA and other peft adapters of a target."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from torch import nn

from outrider.errors import ConfigError, TargetError, first_line
from outrider.targets.files import ADAPTER, file_problem


def merged(model: Any, adapter: str | Path) -> Any:
    """The model with an adapter merged into its weights.  Raises TargetError if it can't be merged."""
    folder = Path(adapter).expanduser()
    if not (folder / ADAPTER).is_file():
        raise ConfigError(f"adapter {str(adapter)!r} is not a folder with an {ADAPTER}; give one saved by peft")
    files = [folder / ADAPTER, *sorted(folder.glob("adapter_model.*"))]
    if problem := next(filter(None, map(file_problem, files)), None):
        raise TargetError(problem)
    try:
        from peft import PeftModel
    except ImportError as error:
        raise TargetError(
            f"adapter {str(adapter)!r} needs peft ({error}); pip install peft, or merge it first"
        ) from None
    try:
        whole: Any = PeftModel.from_pretrained(model, str(folder))
        kinds = [config.is_prompt_learning for config in whole.peft_config.values()]
        if any(kinds):
            raise ValueError("it is a learned prompt, which can't be merged into weights")
        return whole.merge_and_unload(safe_merge=True)
    except (SafetensorError, OSError, RuntimeError, ValueError, KeyError, TypeError, json.JSONDecodeError) as error:
        name = getattr(model.config, "_name_or_path", "") or type(model).__name__
        raise TargetError(
            f"adapter {str(adapter)!r} can't be merged into {name}: {first_line(error)}; use the adapter's own base"
        ) from error


def without_wrapper(model: nn.Module) -> nn.Module:
    """The model inside peft's wrapper, whose layers hold the adapter; any other module unchanged.

    Raises TargetError for an adapter that is not in the layers.
    """
    configs = getattr(model, "peft_config", None)
    if not isinstance(configs, dict) or not hasattr(model, "get_base_model"):
        return model
    if any(getattr(config, "is_prompt_learning", False) for config in configs.values()):
        raise TargetError(
            f"{type(model).__name__} has a learned prompt, which targets don't support; use a LoRA adapter"
        )
    return model.get_base_model()  # type: ignore[operator]
