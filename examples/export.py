"""Export: a trained checkpoint in the format that vLLM reads, read back and compared, with a model card.

    $ python examples/export.py [CHECKPOINT] [OUT]

Without a checkpoint it takes that of examples/train.py.
"""

import sys
from pathlib import Path

import outrider
from outrider.engines.export import export
from outrider.export.reading import import_folder


def main(checkpoint: str = "runs/train/checkpoint", out: str = "served") -> None:
    target = outrider.load_target("demo")
    folder = export(checkpoint, "vllm", out, target)  # every weight is read back and compared before it appears
    for file in sorted(folder.iterdir()):
        print(f"{file}: {file.stat().st_size:,} bytes")

    again = Path(f"{out}-imported")
    import_folder(folder, again, target)  # the way back, for drafters that others have published
    settings = {"max_new_tokens": 48, "policy": "fixed"}
    own, theirs = (
        outrider.generate(target, "import json\n", outrider.load_drafter(place, target), **settings)
        for place in (checkpoint, again)
    )
    assert own == theirs
    print(f"the imported drafter has the same drafts accepted, step by step: {own[0].accepted}")


if __name__ == "__main__":
    main(*sys.argv[1:])
