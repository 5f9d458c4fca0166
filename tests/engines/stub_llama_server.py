"""A program that takes llama-server's arguments and answers as it does, from a script.

STUB_SCRIPT names a JSON file: {answers: [{tokens, steps: [[drafted, accepted]], logged: true}], fault: null, "start",
"request" or "silent"}.  start: it ends before it answers; request: it ends when it is first asked; silent: it takes the
first request and says nothing.
"""

import json
import os
import sys
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

SCRIPT = json.loads(Path(os.environ["STUB_SCRIPT"]).read_text()) if "STUB_SCRIPT" in os.environ else {}
ANSWERS = list(SCRIPT.get("answers", ()))


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.say({"status": "ok"})

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        if SCRIPT.get("fault") == "request":
            print("GGML_ASSERT(n_rows > 0) failed", file=sys.stderr, flush=True)
            os._exit(134)
        if SCRIPT.get("fault") == "silent":
            print("slot update_slots: id  0 | task 0 | thinking", file=sys.stderr, flush=True)
            time.sleep(600)
        task = len(SCRIPT["answers"]) - len(ANSWERS)
        answer = ANSWERS.pop(0)
        begin = f"0.01.002 I slot      release: id  0 | task {3 * task} | "
        for drafted, accepted in answer["steps"] if answer.get("logged", True) else ():
            print(f"{begin}accepted {accepted:2d}/{drafted:2d} draft tokens", file=sys.stderr)
        print(f"{begin}stop processing: n_tokens = 9, truncated = 0", file=sys.stderr, flush=True)
        counts = [sum(step[side] for step in answer["steps"]) for side in (0, 1)]
        self.say({"tokens": answer["tokens"], "timings": {"draft_n": counts[0], "draft_n_accepted": counts[1]}})

    def say(self, value: object) -> None:
        body = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *words: object) -> None: ...


if __name__ == "__main__":
    if "--version" in sys.argv:
        print("version: 0.5.0-dev (build 1, commit 0c1e570)", file=sys.stderr)
        raise SystemExit(0)
    if SCRIPT.get("fault") == "start":
        print("load_model: failed\nmissing tensor 'fc.weight'", file=sys.stderr)
        raise SystemExit(1)
    HTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Handler).serve_forever()
