"""Compiles a function into a package: torch.export traces it, inductor compiles the graph.

If its layers multiply in panels, the package has no weights and uses those in memory.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import io
import logging
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.export.graph_signature import InputKind
from torch.utils import _pytree as pytree

from outrider import kernels
from outrider.errors import NotCompiled, first_line
from outrider.fast.packages import rewrite
from outrider.fast.packages.package import written
from outrider.kernels import prepacked
from outrider.storage import cache
from outrider.storage.trusted import private_folder

log = logging.getLogger(__name__)

MOST_BYTES = 2**31
"""Models with more bytes of weights are not compiled on a CPU if the package would contain a copy of them."""

MOST_CONSTANTS = 2**16
"""Number of values of tensors created during tracing that a package without weights may contain; with more, it also
contains weights."""

HOLDS_WEIGHTS = "aot_inductor.package_constants_in_so"
"""Inductor's setting for whether a package contains the weights or gets them when it is loaded."""
REWRITING = "post_grad_custom_pre_pass"
"""Inductor's setting for a function that rewrites the graph."""
BUILDS: dict[str, dict[str, Any]] = {
    "libraries": {},
    "templates": {"max_autotune": True, "max_autotune_gemm_backends": "CPP"},
}
"""Sources of inductor's matrix products: torch's libraries, or C++ generated for each shape."""


def builds(model: nn.Module) -> dict[str, dict[str, Any]]:
    """Ways to compile this model, with inductor's settings.  If its layers are packed in panels, only one: with our
    kernel, and without a copy of the weights."""
    if prepacked.way_of(model) != "panels":
        return BUILDS
    number = {layer: n for n, layer in enumerate(prepacked.in_panels(model))}
    names = model.named_modules(remove_duplicate=False)
    numbers = {f"{name}.{prepacked.PANELS}": number[layer] for name, layer in names if layer in number}
    rewriting = functools.partial(rewrite.with_kernels, panels=numbers)
    shims = {getattr(torch.ops.outrider, name).default: [shim] for name, shim in kernels.SHIMS.items()}
    ours = {"aot_inductor.custom_ops_to_c_shims": shims, REWRITING: rewriting}
    return {"panels": ours | {"freezing": False, HOLDS_WEIGHTS: False}}


def has_compiler() -> bool:
    return kernels.compiler() is not None


def may_build() -> bool:
    """Whether steps are compiled by default: $OUTRIDER_COMPILE is not `off`, and there is a compiler."""
    return os.environ.get("OUTRIDER_COMPILE") != "off" and has_compiler()


def build_package(
    path: Path,
    function: nn.Module,
    example: tuple[Any, ...],
    dims: Any,
    options: Mapping[str, Any] = BUILDS["libraries"],
) -> float:
    """Compile `function` on arguments like `example` into `path`; returns seconds.  Raises NotCompiled if it can't.

    options: one of `BUILDS`.
    dims: for every argument a mapping from dimension to `torch.export.Dim`, in the structure of the arguments.  The
    compiled function writes to the same arguments as the module.
    """
    if not has_compiler():
        raise NotCompiled("no C++ compiler was found; install g++ for faster steps; without it steps stay plain")
    began = time.perf_counter()
    # its default is a path in /tmp that another user could have created, with code to run in it
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(private_folder(cache.folder() / "inductor")))
    try:
        # inductor packs weights for oneDNN itself
        with (
            cache.keeping(path) as part,
            torch.no_grad(),
            prepacked.enabled("panels"),
            prepacked.as_parameters(function),
        ):
            # inference tensors can't be traced
            example = pytree.tree_map_only(Tensor, Tensor.clone, example)
            with contextlib.redirect_stderr(io.StringIO()):  # it prints hundreds of lines if it can't trace something
                exported = torch.export.export(function, example, dynamic_shapes=dims, strict=False)
            configs = {"freezing": True, **options}
            weights = weights_of(function)
            lifted = {name: value for name, value in exported.constants.items() if name not in weights}
            for spec in exported.graph_signature.input_specs:  # otherwise they lose their names
                if spec.kind == InputKind.CONSTANT_TENSOR:
                    spec.kind, spec.persistent = InputKind.BUFFER, False
            are_small = sum(value.numel() for value in lifted.values()) <= MOST_CONSTANTS
            is_outside = are_small and not options.get(HOLDS_WEIGHTS, True)
            if not is_outside:
                refuse_large(function)
            configs |= {
                HOLDS_WEIGHTS: not is_outside,
                "aot_inductor.metadata": {"constants": written(lifted)} if is_outside else {},
            }
            if is_outside and REWRITING in configs:
                configs[REWRITING] = functools.partial(configs[REWRITING], holds_weights=False)
            torch._inductor.aoti_compile_and_package(exported, package_path=str(part), inductor_configs=configs)
    except NotCompiled:
        raise
    except Exception as error:  # the compiler may raise anything for a new family
        raise NotCompiled(f"can't be compiled: {type(error).__name__}: {first_line(error)[:300]}") from error
    gc.collect()  # graphs in reference cycles hold the weights
    seconds = time.perf_counter() - began
    log.info("compiled %s in %.0f s, %.0f MB", path, seconds, path.stat().st_size / 1e6)
    return seconds


def refuse_large(model: nn.Module) -> None:
    """Raises NotCompiled if a copy of the weights would be too large."""
    if sum(weight.nbytes for weight in model.parameters()) > MOST_BYTES:
        raise NotCompiled(
            f"it has more than {MOST_BYTES >> 30} GiB of weights, which a compiled package would copy; its steps "
            "stay plain"
        )


def weights_of(module: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers by name, with all names of tied ones."""
    return {
        **dict(module.named_parameters(remove_duplicate=False)),
        **dict(module.named_buffers(remove_duplicate=False)),
    }
