"""What llama.cpp computes with a drafter's GGUF file, in a few lines of torch: its graphs of dflash, eagle3, qwen3
and glm4moe, for one text and greedy drafts.

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
        """x [n, h, d].  Neighbouring numbers are a pair in an eagle3, else halves."""
        share = self.keys.get("rope.dimension_count", self.size)
        steps = torch.arange(share // 2, dtype=torch.float64) / (share // 2)
        each = self.keys["rope.freq_base"] ** -steps / self.tensors.get("rope_freqs.weight", torch.ones(1)).double()
        if self.keys.get("rope.scaling.type") == "linear":
            each = each / self.keys["rope.scaling.factor"]
        angle = (positions.double()[:, None] * each).float()[:, None]
        part, rest = x[..., :share], x[..., share:]
        if self.architecture == "eagle3":
            a, b = part[..., 0::2], part[..., 1::2]
            turned = torch.stack([a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()], -1).flatten(-2)
        else:
            a, b = part.chunk(2, -1)
            turned = torch.cat([a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()], -1)
        return torch.cat([turned, rest], -1)

    def keys_values(self, layer: str, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        k = self.times(f"{layer}.attn_k", x).unflatten(-1, (self.kv_heads, -1))
        k = self.norm(f"{layer}.attn_k_norm", k) if f"{layer}.attn_k_norm" in self else k
        return self.rotated(k, positions), self.times(f"{layer}.attn_v", x).unflatten(-1, (self.kv_heads, -1))

    def attention(
        self, layer: str, x: Tensor, positions: Tensor, context: tuple[Tensor, Tensor] | None, causal: bool
    ) -> Tensor:  # fmt: skip
        q = self.times(f"{layer}.attn_q", x).unflatten(-1, (self.heads, -1))
        q = self.rotated(self.norm(f"{layer}.attn_q_norm", q) if f"{layer}.attn_q_norm" in self else q, positions)
        k, v = self.keys_values(layer, x, positions)
        if context is not None:
            k, v = torch.cat([context[0], k]), torch.cat([context[1], v])
        found = F.scaled_dot_product_attention(
            *(one.transpose(0, 1)[None] for one in (q, k, v)), is_causal=causal, enable_gqa=True
        )
        return self.times(f"{layer}.attn_output", found[0].transpose(0, 1).flatten(1))

    def mlp(self, layer: str, x: Tensor, suffix: str = "") -> Tensor:
        gate, up = self.times(f"{layer}.ffn_gate{suffix}", x), self.times(f"{layer}.ffn_up{suffix}", x)
        return self.times(f"{layer}.ffn_down{suffix}", F.silu(gate) * up)

    def scattered(self, logits: Tensor, tokens: int) -> Tensor:
        if "d2t" not in self.tensors:
            return logits
        return torch.full((len(logits), tokens), -torch.inf).index_copy(1, self.tensors["d2t"], logits)


def layer_inputs(model: Any, tokens: Tensor) -> tuple[Tensor, ...]:
    """What goes into each of a transformers model's layers, [S, H] each."""
    return tuple(state[0] for state in model(tokens[None], output_hidden_states=True).hidden_states)


@torch.no_grad()
def block(file: File, model: Any, text: Tensor, anchor: int) -> tuple[Tensor, Tensor | None]:
    """Logits [K, V] of one drafted block after a text [S], and confidences [K]; greedy."""
    inputs, words = layer_inputs(model, text), model.get_input_embeddings().weight
    states = torch.cat([inputs[k] for k in file.keys["target_layers"]], -1)
    context, places = file.norm("enc.output_norm", file.times("fc", states)), torch.arange(len(text))
    width = file.keys["block_size"]
    x = words[torch.tensor([anchor] + [file.keys["tokenizer.ggml.mask_token_id"]] * (width - 1))]
    at = len(text) + torch.arange(width)
    for i in range(file.keys["block_count"]):
        layer = f"blk.{i}"
        seen = file.keys_values(layer, context, places)
        x = x + file.attention(layer, file.norm(f"{layer}.attn_norm", x), at, seen, causal=False)
        x = x + file.mlp(layer, file.norm(f"{layer}.ffn_norm", x))
    x = file.norm("output_norm", x)
    logits, first = x @ model.get_output_embeddings().weight.T, 0
    is_dspark = "markov_w1" in file
    if not is_dspark or not file.keys["sample_from_anchor"]:
        first = 1
    if not is_dspark:
        return logits[first:], None
    rows, confidences, previous = [], [], anchor
    for slot in range(first, width):
        word = file.tensors["markov_w1.weight"][previous]
        rows.append(logits[slot] + file.times("markov_w2", word))
        if "conf_proj" in file:
            found = file.times("conf_proj", torch.cat([x[slot], word])) + file.tensors["conf_proj.bias"]
            confidences.append(found.sigmoid()[0])
        previous = int(rows[-1].argmax())
    return torch.stack(rows), torch.stack(confidences) if confidences else None


@torch.no_grad()
def eagle3(file: File, model: Any, text: Tensor) -> Tensor:
    """Logits [2, V] of the two tokens after a text [S + 1], whose last token the target has not read; greedy."""
    inputs, words = layer_inputs(model, text[:-1]), model.get_input_embeddings().weight
    fused = file.times("fc", torch.cat([inputs[k] for k in file.keys["target_layers"]], -1))
    tokens, rows = text[1:], []
    for _ in range(2):
        g = file.norm("blk.0.attn_norm_2", fused)
        x = torch.cat([file.norm("blk.0.attn_norm", words[tokens]), g], -1)
        residual = g if file.keys["norm_before_residual"] else fused
        x = residual + file.attention("blk.0", x, torch.arange(len(tokens)), None, causal=True)
        x = x + file.mlp("blk.0", file.norm("blk.0.ffn_norm", x))
        head = file.tensors.get("output.weight", model.get_output_embeddings().weight)
        logits = file.scattered(file.norm("output_norm", x[-1:]) @ head.T, len(words))
        rows.append(logits[0])
        fused, tokens = torch.cat([fused, x[-1:]]), torch.cat([tokens, logits.argmax(-1)])
    return torch.stack(rows)


@torch.no_grad()
def states(file: File, text: Tensor) -> Tensor:
    """A language model's states after the final norm [S, H]; a qwen3's or the dense layers of a glm4moe."""
    x, places = file.tensors["token_embd.weight"][text], torch.arange(len(text))
    after = "post_attention_norm" if file.architecture == "glm4moe" else "ffn_norm"
    for i in range(file.keys.get("leading_dense_block_count", file.keys["block_count"])):
        layer = f"blk.{i}"
        x = x + file.attention(layer, file.norm(f"{layer}.attn_norm", x), places, None, causal=True)
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
    x = x + file.attention(layer, file.norm(f"{layer}.attn_norm", x), torch.arange(1, len(text)), None, causal=True)
    y = file.norm(f"{layer}.post_attention_norm", x)
    chosen = (file.times(f"{layer}.ffn_gate_inp", y)).sigmoid()
    routed = {name: file.tensors[f"{layer}.ffn_{name}_exps.weight"][0] for name in ("gate", "up", "down")}
    expert = (F.silu(y @ routed["gate"].T) * (y @ routed["up"].T)) @ routed["down"].T
    x = x + chosen / chosen.sum(-1, keepdim=True) * expert + file.mlp(layer, y, "_shexp")
    head = file.tensors.get("output.weight", file.tensors["token_embd.weight"])
    return file.norm(f"{layer}.nextn.shared_head_norm", x[-1]) @ head.T
