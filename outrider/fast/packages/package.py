"""Packages of torch's ahead-of-time compiler, run without the interpreter's lock (GIL).

torch's own Python call holds the lock for the whole pass, during which a server could not send an answer or accept a
request.  Operators release the lock, so packages are run by our own operator if there is a C++ compiler.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import json
import logging
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from outrider import kernels
from outrider.errors import first_line
from outrider.storage import cache

log = logging.getLogger(__name__)

SOURCE = Path(__file__).with_name("package.cpp")
FLAGS = ("-O1", "-std=c++17", "-shared", "-fPIC")


class Package:
    """A loaded package.  Raises RuntimeError if it can't be loaded."""

    def __init__(self, path: Path):
        self._operators: Any = None
        self._loaded: Any
        library = operators()
        if library is None:
            self._loaded = torch._inductor.aoti_load_package(str(path))
            text, self.names = self._loaded.loader.get_metadata().get("constants", ""), self._loaded.get_constant_fqns()
        else:
            self._operators = torch.ops.outrider
            self._loaded = self._operators.open_package(str(path))
            # not an operator: finalizers run at any time, and a trace in progress would record the call
            weakref.finalize(self, library.outrider_close_package, ctypes.c_int64(self._loaded))
            text, self.names = self._operators.describe_package(self._loaded)
        self.has_weights, self.constants = not text, _read(text)
        """Whether it contains the weights; if not, `give` sets them and `constants`, which are not weights.  `names`
        are all that it needs."""

    def give(self, weights: Mapping[str, Tensor]) -> None:
        """Set the weights by name; they are not copied, and must live as long as the package."""
        if self._operators is None:
            self._loaded.load_constants(dict(weights), check_full_update=True, user_managed=True)
        else:
            self._operators.give_package(self._loaded, list(weights), list(weights.values()))

    def run(self, arguments: list[Tensor]) -> list[Tensor]:
        if self._operators is None:
            # calling the package parses its description every time: 0.3 ms for 16 layers
            return self._loaded.loader.boxed_run(arguments)
        return self._operators.run_package(self._loaded, arguments)


def written(constants: Mapping[str, Tensor]) -> str:
    """Small tensors as text, for a package without weights."""
    each = {name: (str(value.dtype), list(value.shape), value.flatten().tolist()) for name, value in constants.items()}
    return json.dumps(each)


def _read(text: str) -> dict[str, Tensor]:
    """The tensors in the output of `written`."""
    return {
        name: torch.tensor(values, dtype=getattr(torch, dtype.removeprefix("torch."))).view(shape)
        for name, (dtype, shape, values) in json.loads(text or "{}").items()
    }


@functools.cache
def operators() -> ctypes.CDLL | None:
    """The library with our operators on packages, in `torch.ops.outrider`; None if it can't be compiled."""
    question = repr((torch.__version__, SOURCE.read_bytes(), FLAGS))
    name = f"package-{hashlib.sha256(question.encode()).hexdigest()[:16]}.so"
    folder = Path(torch.__file__).parent
    include = [f"-I{folder / 'include'}", f"-I{folder / 'include' / 'torch' / 'csrc' / 'api' / 'include'}"]
    flags = [*FLAGS, str(SOURCE), *include, f"-L{folder / 'lib'}", "-ltorch_cpu", "-lc10"]
    abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}"
    try:
        return ctypes.CDLL(str(kernels.shared_library(cache.folder() / "compiled" / name, [[abi, *flags]])))
    except (OSError, RuntimeError) as error:
        log.info("packages are run by torch's own call: %s", first_line(error))
        return None
