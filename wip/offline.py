"""Which register, and what one job gains on it, without a server.  offline.py REGISTER COUNT STEPS [LR]"""
import sys, time, json, shutil
from pathlib import Path
sys.path.insert(0, "/work/main")
import torch
torch.set_num_threads(1)
from benchmarks import learning as B
from benchmarks.batch_time import CHECKPOINT
from outrider import load_target, load_drafter, generate
from outrider.serve.learning.buffer import Text
from outrider.serve.learning.config import Learning
from outrider.serve.learning.folder import opened
from outrider.serve.learning.job import make_version
from outrider.serve.learning.trial import measured, compared
t = load_target("demo", compile=False); d = load_drafter(CHECKPOINT, t)
what = sys.argv[1]
if what == "base":
    for r in B.REGISTERS:
        ps = B.shifted(r, 24, True); b = time.time()
        texts = [Text(t.encode(p), [0]*64, []) for p in ps]
        rep = measured(t, d, texts, 64)
        print(r, len(ps), sum(len(x.prompt) for x in texts)/len(texts), "tokens/step", rep.rows[0].tokens_per_step, "s", time.time()-b, flush=True)
        g = generate(t, [texts[0].prompt], max_new_tokens=48); print("   ", repr(g[0].text[:160]))
    raise SystemExit
count, steps = int(sys.argv[2]), int(sys.argv[3]); lr = float(sys.argv[4]) if len(sys.argv)>4 else None
place = Path(f"/tmp/o/l/{what}"); 
cfg = Learning(folder=str(place), held_out=4, prompts=48, steps=steps, lr=lr)
f = opened(cfg, CHECKPOINT, {"name": "demo"}, 2)
if not f.buffer.files("train"):
    b = time.time(); ps = [t.encode(p) for p in B.shifted(what, count, False)]
    with torch.inference_mode(): gs = generate(t, ps, d, max_new_tokens=64, temperature=0.0, policy="fixed")
    f.buffer.add([Text(p, g.tokens, [(4, a) for a in g.accepted]) for p, g in zip(ps, gs) if len(g.tokens) > 4])
    print("texts", len(ps), time.time()-b, flush=True)
b = time.time(); r = make_version(f); print(json.dumps(r), time.time()-b, flush=True)
ev = [Text(t.encode(p), [0]*96, []) for p in B.shifted(what, 64, True)]
tr = compared(t, load_drafter(f.checkpoint(r["version"]), t), d, ev, 96, 16)
print("eval", tr.reason, flush=True)
