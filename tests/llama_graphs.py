"""What llama.cpp computes with a GGUF file, in a few lines of torch: its graphs of qwen3 and glm4moe, for one text.
Its graphs of dflash and eagle3 are those of outrider/engines/verify/gguf_reader.py.

Files are read by llama.cpp's own library.  S tokens of a text, H hidden size, h heads, d head size.
"""

from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor


class File:
    """Keys without the architecture's name, and tensors in float32."""

    def __init__(self, path: Path):
        import gguf

        reader = gguf.GGUFReader(path)
        said = {name: field.contents() for name, field in reader.fields.items() if not name.startswith("GGUF.")}
        self.architecture = said["general.architecture"]
        self.keys: dict[str, Any] = {name.removeprefix(f"{self.architecture}."): value for name, value in said.items()}
        self.tensors: dict[str, Tensor] = {}
        for one in reader.tensors:
            is_number = one.tensor_type == gguf.GGMLQuantizationType.I64
            data = one.data if is_number else gguf.quants.dequantize(one.data, one.tensor_type)
            self.tensors[one.name] = torch.from_numpy(np.array(data))
        self.heads, self.kv_heads = self.keys["attention.head_count"], self.keys["attention.head_count_kv"]
        self.eps, self.size = self.keys["attention.layer_norm_rms_epsilon"], self.keys["attention.key_length"]

    def __contains__(self, name: str) -> bool:
        return f"{name}.weight" in self.tensors

    def times(self, name: str, x: Tensor) -> Tensor:
        return x @ self.tensors[f"{name}.weight"].T

    def norm(self, name: str, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.tensors[f"{name}.weight"]

    def rotated(self, x: Tensor, positions: Tensor) -> Tensor:
        """x [n, h, d].  Halves are pairs."""
        share = self.keys.get("rope.dimension_count", self.size)
        steps = torch.arange(share // 2, dtype=torch.float64) / (share // 2)
        each = self.keys["rope.freq_base"] ** -steps
        angle = (positions.double()[:, None] * each).float()[:, None]
        part, rest = x[..., :share], x[..., share:]
        a, b = part.chunk(2, -1)
        turned = torch.cat([a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()], -1)
        return torch.cat([turned, rest], -1)

    def attention(self, layer: str, x: Tensor, positions: Tensor) -> Tensor:
        q, k = (self.times(f"{layer}.attn_{name}", x).unflatten(-1, (heads, -1)) for name, heads in
                (("q", self.heads), ("k", self.kv_heads)))  # fmt: skip
        if f"{layer}.attn_q_norm" in self:
            q, k = self.norm(f"{layer}.attn_q_norm", q), self.norm(f"{layer}.attn_k_norm", k)
        v = self.times(f"{layer}.attn_v", x).unflatten(-1, (self.kv_heads, -1))
        each = (one.transpose(0, 1)[None] for one in (self.rotated(q, positions), self.rotated(k, positions), v))
        found = F.scaled_dot_product_attention(*each, is_causal=True, enable_gqa=True)
        return self.times(f"{layer}.attn_output", found[0].transpose(0, 1).flatten(1))

    def mlp(self, layer: str, x: Tensor, suffix: str = "") -> Tensor:
        gate, up = self.times(f"{layer}.ffn_gate{suffix}", x), self.times(f"{layer}.ffn_up{suffix}", x)
        return self.times(f"{layer}.ffn_down{suffix}", F.silu(gate) * up)


@torch.no_grad()
def states(file: File, text: Tensor) -> Tensor:
    """A language model's states after the final norm [S, H]; a qwen3's or the dense layers of a glm4moe."""
    x, places = file.tensors["token_embd.weight"][text], torch.arange(len(text))
    after = "post_attention_norm" if file.architecture == "glm4moe" else "ffn_norm"
    for i in range(file.keys.get("leading_dense_block_count", file.keys["block_count"])):
        layer = f"blk.{i}"
        x = x + file.attention(layer, file.norm(f"{layer}.attn_norm", x), places)
        x = x + file.mlp(layer, file.norm(f"{layer}.{after}", x))
    return file.norm("output_norm", x)


@torch.no_grad()
def mtp(file: File, text: Tensor) -> Tensor:
    """Logits [V] of the token after a text [S + 1], of which the target has read all but the last; from one file.

    Without the pair of the first token, as here.
    """
    layer = f"blk.{file.keys['block_count'] - file.keys['nextn_predict_layers']}"
    words = file.norm(f"{layer}.nextn.enorm", file.tensors["token_embd.weight"][text[1:]])
    read = file.norm(f"{layer}.nextn.hnorm", states(file, text[:-1]))
    x = file.times(f"{layer}.nextn.eh_proj", torch.cat([words, read], -1))
    x = x + file.attention(layer, file.norm(f"{layer}.attn_norm", x), torch.arange(1, len(text)))
    y = file.norm(f"{layer}.post_attention_norm", x)
    chosen = (file.times(f"{layer}.ffn_gate_inp", y)).sigmoid()
    routed = {name: file.tensors[f"{layer}.ffn_{name}_exps.weight"][0] for name in ("gate", "up", "down")}
    expert = (F.silu(y @ routed["gate"].T) * (y @ routed["up"].T)) @ routed["down"].T
    x = x + chosen / chosen.sum(-1, keepdim=True) * expert + file.mlp(layer, y, "_shexp")
    head = file.tensors.get("output.weight", file.tensors["token_embd.weight"])
    return file.norm(f"{layer}.nextn.shared_head_norm", x[-1]) @ head.T
