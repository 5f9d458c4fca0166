"""Decode: the demo target with n-gram drafts, greedy and whole, then sampled and streamed.

$ python examples/decode.py
"""

import outrider


def main() -> None:
    target = outrider.load_target("demo")  # or a folder, or a Hugging Face id
    drafter = outrider.load_drafter("ngram", target)  # or a checkpoint, such as runs/demo/checkpoint
    prompt = "def read(path):\n"

    [plain] = outrider.generate(target, prompt, max_new_tokens=64)
    [drafted] = outrider.generate(target, prompt, drafter, max_new_tokens=64, policy="fixed")
    assert drafted.tokens == plain.tokens
    print(f"{len(plain.tokens)} tokens: {plain.steps} passes alone, {drafted.steps} with drafts; the same text:")
    print(drafted.text)

    print(f"\nsampled, [drafted] tokens in brackets:\n{prompt}", end="")
    drawn = {"temperature": 0.8, "top_p": 0.95, "seed": 7}  # the seed fixes the text, whatever drafts for it
    for _, tokens, text, num_drafted in outrider.stream(target, prompt, drafter, max_new_tokens=64, **drawn):
        own = target.decode(tokens[num_drafted:]) if num_drafted else text
        print(f"[{text.removesuffix(own)}]{own}" if num_drafted else text, end="", flush=True)
    print()


if __name__ == "__main__":
    main()
