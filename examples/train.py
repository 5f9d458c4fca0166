"""Train: prepare, train and measure a drafter by a run file, then decode with its checkpoint.

    $ python examples/train.py [key.path=value ...]

Results: runs/train with checkpoint/, report.json and report.html.  A run that was stopped goes on when it is called
again.
"""

import sys
from pathlib import Path

import outrider

RUN_FILE = Path(__file__).with_name("train.yaml")


def main(overrides: list[str]) -> None:
    report = outrider.run(RUN_FILE, overrides)
    assert report is not None  # the run file has an `evaluate:` section
    for row in report.rows:
        print(f"{row.drafter} at temperature {row.temperature:g}: {row.tokens_per_step:.2f} tokens per step")

    target = outrider.load_target("demo")
    drafter = outrider.load_drafter("runs/train/checkpoint", target)
    [generation] = outrider.generate(target, "import json\n", drafter, max_new_tokens=48)
    print(generation.text)


if __name__ == "__main__":
    main(sys.argv[1:])
