"""Remote: drafts made here, verified by a server, in token ids; the text is the server's own, and the time is told.

    $ python examples/remote.py [URL TOKENIZER [probes | logprobs]]

Without a URL `outrider serve` is started with the demo target.  A vLLM needs its address, such as
http://127.0.0.1:8000/v1, and the model's folder or Hugging Face id; it knows `logprobs` too.
"""

import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import outrider
from outrider import demo
from outrider.targets.remote.target import Method, RemoteTarget, compare

SERVE = [sys.executable, "-m", "outrider", "serve", "--target", "demo", "--port", "0"]
PROMPT = "EPERM = 1\nENOENT = 2\nESRCH = 3\nEINTR = 4\nEIO = 5\n"


@contextmanager
def demo_server() -> Iterator[str]:
    """The address of a server of our own."""
    with subprocess.Popen(SERVE, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            lines = (re.search(r"server +(http\S+),", line) for line in server.stdout)
            yield next(f"{found[1]}/v1" for found in lines if found)
        finally:
            server.terminate()


def show(url: str, tokenizer: str, method: Method = "probes") -> None:
    with RemoteTarget(url, tokenizer, method=method) as target:
        drafter = outrider.load_drafter("suffix", target)
        plain = target.plain(PROMPT, max_new_tokens=64)
        drafted = target.generate(PROMPT, drafter, max_new_tokens=64)
        print(PROMPT + drafted.texts[0].text)
        assert drafted.texts[0].tokens == plain.texts[0].tokens
        print(f"\nthe same text with drafts and without\n{compare(drafted, plain)}")


def main(*server: str) -> None:
    if server:
        show(*server)
        return
    with demo_server() as url:
        show(url, str(demo.TARGET))


if __name__ == "__main__":
    main(*sys.argv[1:])
