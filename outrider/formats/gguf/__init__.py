"""GGUF, llama.cpp's one file of weights, shape and the target's tokenizer."""
