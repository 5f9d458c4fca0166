"""GGUF, llama.cpp's single file of weights, shape and the target's tokenizer."""
