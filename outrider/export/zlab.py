"""z-lab's DFlash, as its authors release it: read here, and loaded by vLLM and SGLang under the same names.

Masks predict the token of their own position; a block of n slots drafts n - 1 tokens.  Layers are counted from 0, as
here.
"""

from __future__ import annotations

from outrider.export import released, sglang
from outrider.export.layout import Format, Layout

# SpecForge writes the same folder; which of the two it is makes no difference, and sglang's reader recognises both
LAYOUTS = {"dflash": Layout(released.DFLASH, None, sglang.read_dflash)}
FORMAT = Format(LAYOUTS)
